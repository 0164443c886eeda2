"""Capture works on twins: the user's modules are only read, and what changes there is noticed."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import sys
import threading
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel

import fxpipe
from tests.helpers.marks import mostly_slow

X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def linear(inputs: int = 6, outputs: int = 6) -> nn.Linear:
    return nn.Linear(inputs, outputs).double()


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()
        self.norm = nn.BatchNorm1d(6).double().eval()
        self.scale = 0.5


class ByMethod(Base):
    """Holds a bound method of a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.run = self.a.forward

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.run(x))) * self.scale


class ByList(Base):
    """Holds submodules in a list, a dict and a set beside `_modules`."""

    def __init__(self) -> None:
        super().__init__()
        self.order = [self.b, self.a]
        self.named = {"first": (self.a, 2.0)}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.order:
            x = torch.tanh(layer(x))
        layer, factor = self.named["first"]
        return layer(x) * factor * self.scale


class Child(nn.Module):
    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.parent = weakref.ref(parent)
        self.direct = (parent,)  # past __setattr__, which would register it
        self.fc = linear()

    def forward(self, x: Tensor) -> Tensor:
        parent: Any = self.parent()
        parent.calls = parent.calls + 1
        return self.fc(x) * self.direct[0].scale + parent.b(x)


class ByParent(Base):
    """Its submodule holds on to it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.child = Child(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.child(torch.tanh(self.a(x)))

    def __deepcopy__(self, memo: dict[int, Any]) -> ByParent:
        made = ByParent()
        made.load_state_dict(self.state_dict())
        made.scale, made.calls = self.scale, self.calls
        return made


class ByClosure(Base):
    """Holds functions whose closures and defaults have submodules."""

    def __init__(self) -> None:
        super().__init__()
        a, b = self.a, self.b

        def both(x: Tensor, *, last: nn.Module = b) -> Tensor:
            return last(torch.tanh(a(x)))

        self.both = both
        self.part = functools.partial(both, last=a)

    def forward(self, x: Tensor) -> Tensor:
        return (self.both(x) + self.part(x)) * self.scale

    def __deepcopy__(self, memo: dict[int, Any]) -> ByClosure:
        made = ByClosure()
        made.load_state_dict(self.state_dict())
        made.scale = self.scale
        return made


class Helper:
    def __init__(self, module: nn.Module) -> None:
        self.module, self.seen = module, 0

    def run(self, x: Tensor) -> Tensor:
        self.seen = 1
        return torch.tanh(self.module.a(x))


class ByObject(Base):
    """Its helper has the model."""

    def __init__(self) -> None:
        super().__init__()
        self.helper = Helper(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.helper.run(x)) * self.scale


class Slotted(Base):
    """Has attributes that are not in its `__dict__`, and methods of its own for them."""

    __slots__ = ("__hidden", "layer")

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "layer", self.a)
        self.__hidden = 2.0

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value * 1.0 if name == "scale" else value)

    def __getattr__(self, name: str) -> Any:
        return 3.0 if name == "made_up" else super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.layer(x))) * self.scale * self.__hidden * self.made_up

    def __deepcopy__(self, memo: dict[int, Any]) -> Slotted:
        made = Slotted()
        made.load_state_dict(self.state_dict())
        made.scale = self.scale
        return made


def wrapped_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._old_forward(*args, **kwargs) * module.factor  # type: ignore[operator]


class Wrapped(Base):
    """The forward of a submodule was replaced by a partial of it, as accelerate does."""

    def __init__(self) -> None:
        super().__init__()
        own = self.a.forward
        self.a.factor, self.a._old_forward = 2.0, own  # type: ignore[assignment]
        self.a.forward = functools.update_wrapper(functools.partial(wrapped_forward, self.a), own)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))) * self.scale

    def __deepcopy__(self, memo: dict[int, Any]) -> Wrapped:
        made = Wrapped()
        made.load_state_dict(self.state_dict())
        made.scale = self.scale
        return made


class Hooked(Base):
    """A method of the model hangs on a submodule as a hook, and notes what comes by."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None
        self.a.register_forward_hook(self.hook)

    def hook(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.last = output
        return output * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Tied(Base):
    """One parameter in two places, and a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.b.weight = self.a.weight
        self.c = parametrizations.weight_norm(linear())

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(torch.tanh(self.a(x)))) * self.scale


class Statistics(Base):
    """Writes a buffer in place, sets another one to a new tensor, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(6).double())
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.a(x)))
        if self.training:
            self.ema = self.b.weight.detach()[0] * 0.9
            self.count += 1
        return self.b(x) * self.scale


MODELS = [ByMethod, ByList, ByParent, ByClosure, ByObject, Slotted, Wrapped, Hooked, Tied, Statistics]


@pytest.fixture(params=MODELS, ids=lambda kind: kind.__name__)
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = request.param()
    return made


def identities(model: nn.Module) -> dict[str, Any]:
    """What a model is made of, by identity: its modules, tensors, attributes, and what their dicts and lists hold."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        found[path] = id(module), id(vars(module)), type(module)
        for name, value in vars(module).items():
            found[f"{path}:{name}"] = id(value)
            if isinstance(value, dict):
                found[f"{path}:{name}:items"] = [(key, id(item)) for key, item in value.items()]
            elif isinstance(value, list):
                found[f"{path}:{name}:items"] = list(map(id, value))
    return found


def pipe_of(model: nn.Module, **options: Any) -> fxpipe.Pipe:
    return fxpipe.compile(model, devices=2, chunks=2, **options)


def check_alike(pipe: fxpipe.Pipe, plain: nn.Module) -> None:
    """A call, with all gradients, and a step are those of the plain model."""
    results = []
    for net in (pipe, plain):
        net.zero_grad()
        net(X).square().sum().backward()
        results.append([p.grad for p in net.parameters()])
    for mine, own in zip(*results, strict=True):
        torch.testing.assert_close(mine, own)
    pipe.zero_grad(), plain.zero_grad()
    loss = pipe.step(X, target=X, loss_fn=F.mse_loss)
    expected = F.mse_loss(plain(X), X)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for mine, own in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, own.grad)
    for mine, own in zip(pipe.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, own)


def test_the_model_is_left_as_it_is(model: nn.Module) -> None:
    plain, before = copy.deepcopy(model), identities(model)
    pipe = pipe_of(model)
    pipe.prepare(X)
    assert identities(model) == before
    check_alike(pipe, plain)
    after, called = identities(model), identities(plain)
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed <= {":count", ":calls", ":last"}
    assert after.keys() == called.keys()
    for name in changed:
        mine, own = (getattr(net, name[1:]) for net in (model, plain))
        torch.testing.assert_close(mine, own)
    pipe.close()


def freeze(model: Any) -> None:
    model.b.weight.requires_grad_(False)


def assign(model: Any) -> None:
    model.load_state_dict({key: value * 1.5 for key, value in model.state_dict().items()}, assign=True)


def set_attribute(model: Any) -> None:
    model.scale = 0.25


def hook(model: Any) -> None:
    model.b.register_forward_hook(lambda module, args, output: output * 3)


def other_tensor(model: Any) -> None:
    model.b.bias = nn.Parameter(model.b.bias.detach() + 1)


def no_tensor(model: Any) -> None:
    model.b.bias = None


def parametrized(model: Any) -> None:
    parametrize.register_parametrization(model.b, "bias", nn.Tanh())


CHANGES = [freeze, assign, set_attribute, hook, other_tensor, no_tensor, parametrized]


CASES = list(product([ByList, ByObject, Slotted], CHANGES))  # each third has each change once, of kinds in turn


@pytest.mark.parametrize(
    ("made", "change"), mostly_slow(CASES, CASES[::3].__contains__), ids=lambda part: part.__name__
)
def test_changes_are_noticed(made: Callable[[], nn.Module], change: Callable[[Any], None]) -> None:
    torch.manual_seed(0)
    model = made()
    plain = copy.deepcopy(model)
    pipe = pipe_of(model)
    check_alike(pipe, plain)
    for net in (model, plain):
        change(net)
    check_alike(pipe, plain)
    pipe.close()


def test_other_modules_are_noticed() -> None:
    torch.manual_seed(0)
    model, plain = ByList(), ByList()
    plain.load_state_dict(model.state_dict())
    pipe = pipe_of(model)
    check_alike(pipe, plain)
    new = linear()
    for net, layer in ((model, new), (plain, copy.deepcopy(new))):
        net.a = layer
        net.order[1] = layer
        net.named["first"] = layer, 1.5
    check_alike(pipe, plain)
    for net in (model, plain):
        net.order.append(net.b)
    check_alike(pipe, plain)
    for net in (model, plain):
        net.half(), net.double()
        net.b.forward = functools.partial(wrapped, net.b)
    check_alike(pipe, plain)
    pipe.close()


def wrapped(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight * 2, layer.bias)


def test_a_slot_of_a_class_is_noticed() -> None:
    torch.manual_seed(0)
    model = Slotted()
    plain = copy.deepcopy(model)
    pipe = pipe_of(model)
    check_alike(pipe, plain)
    for net in (model, plain):
        object.__setattr__(net, "layer", net.b)
    check_alike(pipe, plain)
    pipe.close()


def test_global_hooks_are_noticed() -> None:
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    pipe = pipe_of(model)
    check_alike(pipe, copy.deepcopy(model))
    handle = register_module_forward_hook(
        lambda module, args, output: output * 2 if isinstance(module, nn.Linear) else None
    )
    try:
        with torch.no_grad():
            torch.testing.assert_close(pipe(X), model(X))
    finally:
        handle.remove()
    check_alike(pipe, copy.deepcopy(model))
    pipe.close()


class Fails(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.scale = 7.0
        self.running = x
        raise ValueError("not like this")


class Refused(Base):
    """Writes a plain tensor attribute, which must be a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        self.scale = 7.0
        self.plain += 1
        self.running = x
        return self.b(self.a(x))


@pytest.mark.parametrize("made", [Fails, Refused])
def test_a_capture_that_fails_leaves_the_model_as_it_was(made: Callable[[], nn.Module]) -> None:
    model = made()
    before = identities(model)
    pipe = pipe_of(model)
    for _ in range(2):
        with pytest.raises((fxpipe.FxpipeError, ValueError)):
            pipe.step(X, target=X, loss_fn=F.mse_loss)
        assert identities(model) == before
    pipe.close()


# What computes the loss may reach the model in other ways -------------------------------------------------------------

anything: Any = None


def global_penalty(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) + sum(p.square().sum() for p in anything.parameters())


def penalty(model: nn.Module, output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) + sum(p.square().sum() for p in model.parameters())


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        self.last = output
        return penalty(self.model, output, target)


def by_closure(model: nn.Module) -> Callable[..., Tensor]:
    return lambda output, target: penalty(model, output, target)


def by_parameters(model: nn.Module) -> Callable[..., Tensor]:
    held = list(model.parameters())
    return lambda output, target: F.mse_loss(output, target) + sum(p.square().sum() for p in held)


def by_global(model: nn.Module) -> Callable[..., Tensor]:
    global anything
    anything = model
    return global_penalty


WAYS: dict[str, Callable[[nn.Module], Callable[..., Tensor]]] = {
    "closure": by_closure,
    "a list of parameters": by_parameters,
    "global variable": by_global,
    "partial": lambda model: functools.partial(penalty, model),
    "method": lambda model: Trainer(model).loss,
}


@pytest.mark.parametrize("of_pipe", mostly_slow([False, True], (True).__eq__), ids=["model", "pipe"])
@pytest.mark.parametrize("way", WAYS)
def test_a_loss_of_the_parameters(way: str, of_pipe: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh(), linear())
    plain, before = copy.deepcopy(model), identities(model)
    pipe = pipe_of(model, schedule="1f1b")
    for net in (model, plain):
        net[2].weight.requires_grad_(False)
    for _ in range(2):
        loss = pipe.step(X, target=X, loss_fn=WAYS[way](pipe if of_pipe else model))
        expected = WAYS[way](plain)(plain(X), X)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        for mine, own in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, own.grad)
    assert identities(model) == before
    pipe.close()


# Other threads --------------------------------------------------------------------------------------------------------


def many_captures(model: nn.Module, other: Callable[[], None], count: int = 3) -> None:
    """Pipes of the model capture calls and steps, while another thread does something else with it, over and over."""
    stop, errors = threading.Event(), []

    def work() -> None:
        try:
            while not stop.is_set():
                other()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        for _ in range(count):
            pipe = pipe_of(model, schedule="1f1b")
            with torch.no_grad():
                torch.testing.assert_close(pipe(X), model(X))
            pipe.step(X, target=X, loss_fn=F.mse_loss)
            pipe.close()
    finally:
        stop.set()
        thread.join(60)
        sys.setswitchinterval(interval)
    assert not errors, errors[0]


def model_for_threads() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (linear(), nn.Tanh())))


def state(model: nn.Module) -> Callable[[], None]:
    first = {key: value.sum().item() for key, value in model.state_dict().items()}

    def look() -> None:
        assert {key: value.sum().item() for key, value in model.state_dict().items()} == first

    return look


def evaluation(model: nn.Module) -> Callable[[], None]:
    with torch.no_grad():
        first = model(X)

    def run() -> None:
        with torch.no_grad():
            assert torch.equal(model(X), first)

    return run


def copies(model: nn.Module) -> Callable[[], None]:
    look = state(model)

    def copied() -> None:
        for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            for key, value in made.state_dict().items():
                assert torch.equal(value, model.state_dict()[key])
        look()

    return copied


def average(model: nn.Module) -> Callable[[], None]:
    averaged = AveragedModel(model)

    def update() -> None:
        averaged.update_parameters(model)
        for mine, own in zip(averaged.module.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine, own)

    return update


def other_pipe(model: nn.Module) -> Callable[[], None]:
    with torch.no_grad():
        first = model(X)

    def run() -> None:
        pipe = pipe_of(model)
        with torch.no_grad():
            torch.testing.assert_close(pipe(X), first)
        pipe.close()

    return run


@pytest.mark.parametrize(
    "other",
    mostly_slow([state, evaluation, copies, average, other_pipe], [state].__contains__),
    ids=lambda other: other.__name__,
)
def test_another_thread_uses_the_model_during_captures(other: Callable[[nn.Module], Callable[[], None]]) -> None:
    model = model_for_threads()
    before = identities(model)
    many_captures(model, other(model))
    assert identities(model) == before


def test_two_pipes_of_one_model_capture_at_once() -> None:
    model = model_for_threads()
    plain, before = copy.deepcopy(model), identities(model)
    pipes = [pipe_of(model, schedule=schedule) for schedule in ("1f1b", "gpipe")]
    losses: list[Any] = []
    threads = [
        threading.Thread(target=lambda pipe=pipe: losses.append(pipe.step(X, target=X, loss_fn=F.mse_loss)))
        for pipe in pipes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert identities(model) == before
    expected = F.mse_loss(plain(X), X)
    (2 * expected).backward()
    for loss in losses:
        torch.testing.assert_close(loss, expected.detach())
    assert len(losses) == 2
    for mine, own in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, own.grad)


class Router(Base):
    """Branches on data, so that it is kept whole and learnt by running it; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1).double())

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        if x.sum() > 1e9:
            return x
        return torch.tanh(self.a(x))


@pytest.mark.filterwarnings("ignore:.*kept whole")
def test_what_is_kept_whole_is_learnt_on_twins() -> None:
    model = nn.Sequential(linear(), Router(), linear(), Router(), linear())
    before, seen = identities(model), []
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            seen.append((model[1].seen.item(), identities(model) == before))

    thread = threading.Thread(target=work)
    thread.start()
    pipe = pipe_of(model)
    try:
        pipe.prepare(X)
    finally:
        stop.set()
        thread.join(60)
    assert set(seen) == {(0.0, True)}
    with torch.no_grad():
        torch.testing.assert_close(pipe(X), model(X))
    pipe.close()


def test_nothing_keeps_the_model_or_its_twin() -> None:
    model = ByParent()
    pipe = pipe_of(model)
    pipe.step(X, target=X, loss_fn=by_closure(model))
    gone = [weakref.ref(model), weakref.ref(pipe._state.cache.step_capture.call_capture.twins.root)]
    pipe.close()
    del pipe, model
    gc.collect()
    assert [one() for one in gone] == [None, None]

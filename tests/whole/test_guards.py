"""What a captured graph holds for: whatever forward looks at may change between two calls, and the result stays right.

Each case is a forward and a row of calls, each with arguments of its own and, before it, a change of the model or of
what is around it. A pipe and the plain model make these calls twice. The second time nothing may be captured any more,
and the first time no more than `kinds` calls.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.capture import capture_call
from tests.helpers.marks import mostly_slow
from tests.helpers.transparency import Result, assert_same

DOUBLE = torch.float64
Change = Callable[[Any], object]


def nothing(model: Any) -> None:
    """The model stays as it is."""


class Net(nn.Module):
    """A model whose forward is `body`, with all kinds of things for it to look at."""

    power = 1

    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.body = body
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.scales = nn.ParameterList(torch.linspace(1, 2, 8) for _ in range(2))
        self.drop = nn.Dropout(0.0)
        self.register_buffer("shift", torch.linspace(0, 1, 8, dtype=DOUBLE))
        self.register_buffer("spare", None)
        self.rounds, self.factor, self.kind, self.flag = 1, 1.0, "tanh", False
        self.factors, self.settings = [1.0, 2.0], {"power": 1}
        self.config = SimpleNamespace(power=1)
        self.constant = torch.linspace(1, 2, 8, dtype=DOUBLE)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.layers[2](torch.tanh(self.body(self, *args, **kwargs)))


@dataclass(frozen=True)
class Call:
    """A call: what is done to the model before, what it is called with, and what around it."""

    change: Change = nothing
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def x(*shape: int, dtype: torch.dtype = DOUBLE, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*(shape or (8, 8)), dtype=dtype, generator=generator).requires_grad_(grad)


def given(*rows: Any) -> tuple[Call, ...]:
    """Calls with these arguments: a tuple of them, or the only one beside the batch."""
    return tuple(Call(args=row if isinstance(row, tuple) else (x(), row)) for row in rows)


def changed(*changes: Change) -> tuple[Call, ...]:
    """Calls with the same batch, with these changes of the model before."""
    return tuple(Call(change, (x(),)) for change in changes)


def set(name: str, *values: Any) -> tuple[Call, ...]:
    """Calls with another value of an attribute each, which may be that of a child."""
    holder, _, last = name.rpartition(".")

    def to(value: Any) -> Change:
        return lambda model: setattr(model.get_submodule(holder), last, value)

    return changed(*map(to, values))


# What forward looks at ------------------------------------------------------------------------------------------------

HERE = {"power": 1}
POWER = 1


def set_global(value: int) -> Change:
    return lambda model: globals().update(POWER=value)


def closed(value: list[int]) -> Callable[..., Tensor]:
    exponent = value[0]

    def body(self: Any, x: Tensor) -> Tensor:
        return self.layers[0](x) ** exponent

    def change(new: int) -> None:
        nonlocal exponent
        exponent = new

    vars(body)["change"] = change
    return body


def number(self: Any, x: Tensor, n: float) -> Tensor:
    return self.layers[0](x) * n


def rounds(self: Any, x: Tensor, n: int = 2) -> Tensor:
    for _ in range(n):
        x = torch.tanh(self.layers[0](x))
    return x


def string(self: Any, x: Tensor, name: str) -> Tensor:
    return getattr(F, name)(self.layers[0](x))


def optional(self: Any, x: Tensor, other: Tensor | None = None) -> Tensor:
    return self.layers[0](x) if other is None else self.layers[1](x) + other


def of_list(self: Any, xs: list[Tensor]) -> Tensor:
    return torch.stack([layer(x) for layer, x in zip(self.layers, xs, strict=False)]).sum(0)


def of_dict(self: Any, xs: dict[str, Tensor]) -> Tensor:
    return sum((self.layers[0](x) * len(name) for name, x in xs.items()), torch.zeros(()))


def of_kind(self: Any, x: Tensor) -> Tensor:
    return self.layers[0](x) if x.dtype == DOUBLE else self.layers[1](x.to(DOUBLE))


def by_layout(self: Any, x: Tensor) -> Tensor:
    return self.layers[0](x) if x.is_contiguous() else self.layers[1](x)


def by_gradient(self: Any, x: Tensor) -> Tensor:
    return self.layers[0](x) if x.requires_grad else self.layers[1](x)


def by_weight(self: Any, x: Tensor) -> Tensor:
    return self.layers[0](x) if self.layers[0].weight.requires_grad else self.layers[1](x)


def by_mode(self: Any, x: Tensor) -> Tensor:
    return self.layers[0](x) if torch.is_grad_enabled() else self.layers[1](x)


def by_training(self: Any, x: Tensor) -> Tensor:
    return self.layers[0](x) if self.drop.training else self.layers[1](self.drop(x))


def by_autocast(self: Any, x: Tensor) -> Tensor:
    return self.layers[0](x) if torch.is_autocast_enabled("cpu") else self.layers[1](x)


def by_attributes(self: Any, x: Tensor) -> Tensor:
    x = self.layers[0](x) if self.flag else self.layers[1](x)
    return getattr(torch, self.kind)(x) * self.factor + self.constant


def by_rounds(self: Any, x: Tensor) -> Tensor:
    return rounds(self, x, self.rounds)


def by_lists(self: Any, x: Tensor) -> Tensor:
    for factor in self.factors:
        x = self.layers[0](x) * factor
    return x


def by_settings(self: Any, x: Tensor) -> Tensor:
    return self.layers[0](x) ** (self.settings["power"] + self.config.power + self.power)


def by_global(self: Any, x: Tensor) -> Tensor:
    return self.layers[0](x) ** (POWER + HERE["power"])


def through_layers(self: Any, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = torch.tanh(layer(x))
    for scale in self.scales:
        x = x * scale
    return x if self.spare is None else x + self.spare


def sizes(self: Any, x: Tensor) -> Tensor:
    return self.layers[0](x) * x.shape[1] + x.shape[-2]


def default_dtype(self: Any, x: Tensor) -> Tensor:
    return self.layers[0](x) * torch.full((8,), 1 / 3)


def twice(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return self.layers[0](x) + self.layers[1](y)


def unfreeze(model: Any) -> None:
    model.requires_grad_(True)


def parameter(value: float) -> nn.Parameter:
    return nn.Parameter(torch.full((8, 8), value, dtype=DOUBLE))


def grow(model: Any) -> None:
    if len(model.scales) < 3:
        model.scales.append(nn.Parameter(torch.full((8,), 0.5, dtype=DOUBLE)))


def class_attribute(value: int) -> Change:
    return lambda model: setattr(Net, "power", value)


def half() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


SAME = x()
CLOSED = closed([1])
# What each is called, its forward, its calls, and how many kinds of calls these are. A number that changes is one of
# its own at first, and any number from the second on.
CASES: dict[str, tuple[Callable[..., Tensor], tuple[Call, ...], int]] = {
    "a whole number": (number, given(2, 3, 4, 5, 7), 2),
    "a number": (number, given(0.5, 0.25, 0.75, 3.5), 2),
    "a number of another type": (number, given(2, 2.5, True), 3),
    "how many rounds": (rounds, given(1, 3, 5), 3),
    "a default": (rounds, given((x(),), 2, 3, (x(),)), 3),
    "a string": (string, given("relu", "silu", "relu"), 2),
    "None or not": (optional, given((x(),), (x(), None), (x(), x())), 3),
    "length of a list": (of_list, given(([x()],), ([x(), x(8, 8)],), ([x(), x(), x()],)), 4),
    "keys of a dict": (of_dict, given(({"a": x()},), ({"bb": x()},), ({"a": x(), "ccc": x()},)), 3),
    "shape": (number, given((x(8, 5, 8), 2), (x(8, 6, 8), 2), (x(8, 7, 8), 2), (x(8, 9, 8), 2)), 2),
    "shape equal to the batch": (sizes, given((x(8, 8, 8),), (x(8, 5, 8),), (x(6, 6, 8),)), 2),
    "number of dimensions": (number, given((x(8, 8), 2), (x(8, 5, 8), 2), (x(8, 2, 2, 8), 2)), 3),
    "dtype": (of_kind, given((x(),), (x(dtype=torch.float32),)), 2),
    "strides": (by_layout, given((x(),), (x().t().clone(memory_format=torch.preserve_format),)), 2),
    "gradient of an input": (by_gradient, given((x(),), (x(grad=False),)), 2),
    "an input twice": (twice, given((SAME, x(8, 8)), (SAME, SAME)), 2),
    "batch size": (number, given(*((x(rows, 8), 2) for rows in (8, 7, 5, 12, 3, 2, 1))), 1),
    "train or eval": (by_training, changed(nn.Module.train, nn.Module.eval), 2),
    "train or eval of a child": (by_training, set("drop.training", True, False), 2),
    "grad mode": (by_mode, (Call(args=(x(),)), Call(args=(x(),), around=torch.no_grad)), 2),
    "inference mode": (by_mode, (Call(args=(x(),)), Call(args=(x(),), around=torch.inference_mode)), 2),
    "autocast": (by_autocast, (Call(args=(x(),)), Call(args=(x(),), around=half)), 2),
    "default dtype": (
        default_dtype,
        (
            Call(lambda model: torch.set_default_dtype(DOUBLE), (x(),)),
            Call(lambda model: torch.set_default_dtype(torch.float32), (x(),)),
        ),
        2,
    ),
    "a flag": (by_attributes, set("flag", True, False), 2),
    "a string of the model": (by_attributes, set("kind", "sin", "tanh"), 2),
    "a number of the model": (by_attributes, set("factor", 1.0, 2.0, 3.0, 4.0), 3),
    "a tensor of the model": (by_attributes, set("constant", x(8, grad=False), x(1, 8, grad=False)[0]), 1),
    "rounds of the model": (by_rounds, set("rounds", 1, 3, 5), 3),
    "a list of the model": (by_lists, set("factors", [1.0, 2.0], [1.0, 2.0, 3.0], [2.0]), 3),
    "what is in a list": (
        by_lists,
        changed(lambda model: model.factors.append(0.5), lambda model: model.factors.pop()),
        2,
    ),
    "what is in a dict": (
        by_settings,
        changed(lambda model: model.settings.update(power=2), lambda model: model.settings.update(power=1)),
        2,
    ),
    "an object's attribute": (
        by_settings,
        changed(lambda model: setattr(model.config, "power", 2), lambda model: setattr(model.config, "power", 1)),
        2,
    ),
    "an attribute of the class": (by_settings, changed(class_attribute(2), class_attribute(1)), 2),
    "a global": (by_global, changed(set_global(2), set_global(3), set_global(1)), 3),
    "what is in a global": (
        by_global,
        changed(lambda model: HERE.update(power=2), lambda model: HERE.update(power=1)),
        2,
    ),
    "a closure": (CLOSED, changed(lambda model: CLOSED.change(2), lambda model: CLOSED.change(1)), 2),
    "a layer of another type": (
        through_layers,
        changed(
            lambda model: model.layers.__setitem__(0, nn.Identity()),
            lambda model: model.layers.__setitem__(0, copy.deepcopy(model.layers[1])),
        ),
        2,
    ),
    "a layer of another size": (
        rounds,
        (
            Call(lambda model: model.layers.__setitem__(2, nn.Linear(8, 3, bias=False, dtype=DOUBLE)), (x(),)),
            Call(lambda model: model.layers.__setitem__(2, copy.deepcopy(model.layers[0])), (x(),)),
        ),
        2,
    ),
    # Taking one away makes torch keep the layers in another type of dict from then on.
    "more layers": (
        through_layers,
        changed(*2 * (lambda model: model.layers.append(model.layers[0]), lambda model: model.layers.pop(-1))),
        3,
    ),
    "a parameter more": (through_layers, changed(nothing, grow), 2),
    "another parameter": (
        rounds,
        changed(*(lambda model, v=value: setattr(model.layers[0], "weight", parameter(v)) for value in (0.1, 0.2))),
        1,
    ),
    "a frozen parameter": (
        through_layers,
        changed(lambda model: model.layers[0].weight.requires_grad_(False), unfreeze),
        2,
    ),
    "a model that is frozen": (by_weight, changed(lambda model: model.requires_grad_(False), unfreeze), 2),
    "a buffer or None": (through_layers, set("spare", None, torch.ones(8, dtype=DOUBLE)), 2),
}  # fmt: skip
QUICK = ("a whole number", "None or not", "length of a list", "shape", "train or eval", "a closure", "a flag")
CALLS_ONLY = ("grad mode", "inference mode", "autocast")  # a step needs gradients


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What cases change around the model is as it was."""
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    globals().update(POWER=1)
    Net.power = 1


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One item for each capture from now on."""
    made: list[Any] = []
    kind = capture_call.CallKind
    monkeypatch.setattr(capture_call, "CallKind", lambda traced: made.append(traced) or kind(traced))
    return made


def loss(output: Tensor) -> Tensor:
    return output.sin().sum()


def by_calls(run: Callable[..., Any], model: nn.Module, call: Call) -> Result:
    """What comes of a call and its backward."""
    with call.around():
        output = run(*call.args, **call.kwargs)
    if output.requires_grad:
        loss(output).backward()
    return collect(output, model, call)


def by_steps(pipe: Any, model: nn.Module, call: Call) -> Result:
    """What comes of a step."""
    found = pipe.step(*call.args, loss_fn=loss, outputs=True, **call.kwargs)[1]
    return collect(found, model, call)


def collect(output: Tensor, model: nn.Module, call: Call) -> Result:
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]
    gradients |= {f"input {i}": leaf.grad for i, leaf in enumerate(dict.fromkeys(tensors)) if leaf.is_leaf}
    for tensor in (*tensors, *model.parameters()):
        if tensor.is_leaf:
            tensor.grad = None
    return Result(output.detach(), gradients, dict(model.named_buffers()))


def check(name: str, captures: list[Any], step: Callable[[Any, nn.Module, Call], Result]) -> None:
    body, calls, kinds = CASES[name]
    plain = Net(body).double()
    model = copy.deepcopy(plain)
    pipe = fxpipe.compile(model, 2, 3)
    tol = 5e-2 if name == "autocast" else 1e-9
    for again in range(2):
        for call in calls:
            state = torch.get_rng_state()
            call.change(plain)
            torch.set_rng_state(state)  # a layer that is new has the same weights in both
            wanted = by_calls(plain, plain, call)
            call.change(model)
            assert_same(step(pipe, model, call), wanted, tol)
        if again == 0:
            first = len(captures)
            assert first <= kinds
    pipe.close()
    assert len(captures) == first, "a call that was made before is of no new kind"


@pytest.mark.parametrize("name", mostly_slow(CASES, [*CASES][::4].__contains__))
def test_a_call(name: str, captures: list[Any]) -> None:
    check(name, captures, by_calls)


@pytest.mark.parametrize("name", mostly_slow([name for name in CASES if name not in CALLS_ONLY], QUICK.__contains__))
def test_a_step(name: str, captures: list[Any]) -> None:
    check(name, captures, by_steps)

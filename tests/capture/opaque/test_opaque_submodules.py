"""Models that break the graph: what cannot be traced is kept whole, and the pipeline is still what the model is."""

import contextlib
import copy
import gc
import logging
import random
import re
import threading
import warnings
import weakref
from contextlib import closing
from itertools import product

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves

import fxpipe
from fxpipe.capture.opaque import another_way
from fxpipe.ir.graph.opaque_call import opaques
from tests.helpers.marks import mostly_slow

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is kept whole"),
    pytest.mark.filterwarnings("ignore::fxpipe.errors.MixedSamplesWarning"),  # samples meet in an `if`
]
WIDTH = 6


class Branch(nn.Module):
    """Data-dependent control flow; one way returns what it was given."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if x.sum() > 0 * next(self.parameters()).sum():
            return torch.tanh(self.fc(x))
        return x


class Item(Branch):
    def forward(self, x):
        many = int(x.abs().max().item() * 3)
        for _ in range(many):
            x = torch.tanh(self.fc(x))
        return x


class Numpy(Branch):
    """A number from numpy, through which no gradient flows, beside one that does."""

    def forward(self, x):
        order = torch.from_numpy(x.detach().numpy().argsort(axis=1).copy())
        return self.fc(x).gather(1, order)


class NumpyAlone(Branch):
    def forward(self, x):
        return torch.from_numpy(x.detach().numpy() * 2.0)


class Prints(Branch):
    def forward(self, x):
        print("mean", float(x.mean()))
        return self.fc(x)


class Logs(Branch):
    def forward(self, x):
        logging.getLogger("a model").log(5, "mean %s", x.mean().tolist())
        return self.fc(x)


class Locked(Branch):
    def __init__(self):
        super().__init__()
        self.lock = threading.RLock()

    def __deepcopy__(self, memo):
        made = type(self)().double()
        made.load_state_dict(self.state_dict())
        return made.train(self.training)

    def forward(self, x):
        with self.lock:
            return self.fc(x) if x.max() > 0 else -self.fc(x)


class Tries(Branch):
    def forward(self, x):
        try:
            return self.fc(x) + int(x[0, 0].item() > 0)
        except ValueError:
            return x


class Generator(Branch):
    def forward(self, x):
        def steps():
            while True:
                yield self.fc(x)

        total, made = 0, steps()
        while total < 2 + float(x.sum() > 0 * self.fc.weight.sum()):
            x, total = x + next(made), total + 1
        return x


class Distinct(Branch):
    """Inside, a shape that depends on the data; outside, none."""

    def forward(self, x):
        signs, place = torch.unique(x.detach().sign(), return_inverse=True)
        return self.fc(x) * signs[place]


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x  # not the derivative: whoever computes that has lost this


class OwnBackward(Branch):
    def forward(self, x):
        return Cube.apply(self.fc(x)) if float(x.sum()) > -1e9 else x


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(2, 2, batch_first=True)

    def forward(self, x):
        steps = x.view(len(x), 3, 2)
        lengths = 1 + (steps[:, 1:, 0] > 0).sum(1)
        packed = pack_padded_sequence(steps, lengths, batch_first=True, enforce_sorted=False)
        out, (h, _) = self.rnn(packed)
        return pad_packed_sequence(out, batch_first=True, total_length=3)[0].reshape(len(x), 6) + h[0].repeat(1, 3)


class Several(Branch):
    """Several results, in objects; a constant and a None among them."""

    def forward(self, x, *, scale=1.0):
        if x.sum() > 0 * self.fc.weight.sum():
            x = x + 1
        return {"out": self.fc(x) * scale, "pooled": (x.mean(1), None), "kind": "several"}


class Unpacks(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Several()

    def forward(self, x):
        got = self.inner(x, scale=0.5)
        assert got["kind"] == "several"
        assert got["pooled"][1] is None
        return got["out"] * got["pooled"][0][:, None]


class Counts(Branch):
    """Buffers: one written in place, one set to a new tensor, if the data says so."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        if x.sum() > -1e9 + self.fc.weight.sum():
            self.seen += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.fc(x) + self.mean * self.seen


class Wants(Branch):
    """`requires_grad_` in forward, and a gradient computed inside."""

    def forward(self, x):
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(point.pow(3).sum(), point)
        return self.fc(x) + slope * float(x.numel() > 0 and x.sum().item() > 0)


class Frozen(Branch):
    """No gradient goes through, on one of the ways."""

    def forward(self, x):
        with torch.no_grad() if x[0, 0] > 0 else contextlib.nullcontext():
            return self.fc(x)


class Transposes(Branch):
    """What it returns lies in memory the other way round."""

    def forward(self, x):
        y = self.fc(x).t().contiguous().t()
        return y if y.sum() > 0 else y * 2


class OfNests(Branch):
    def forward(self, items):
        x, (y, _) = items[0]["x"], items[1]["y"]
        return self.fc(x) if x.sum() > 0 * self.fc.weight.sum() else y


class Nests(nn.Module):
    """What it gives is a list of dicts, one of them with a list, of which torch.fx has its own kinds."""

    def __init__(self):
        super().__init__()
        self.inner = OfNests()

    def forward(self, x):
        return self.inner([{"x": x}, {"y": [x * 2, None]}])


BREAKS = [
    Branch, Item, Numpy, Prints, Logs, Locked, Tries, Generator, Distinct, OwnBackward, Packed, Unpacks, Counts, Wants,
    Frozen, Transposes, Nests,
]  # fmt: skip


class Net(nn.Module):
    """Something before, something after, the break in the middle."""

    def __init__(self, *middle):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.middle = nn.ModuleList(middle)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.first(x)
        for part in self.middle:
            x = x + part(x)
        return self.last(torch.relu(x))


def made(*middle):
    torch.manual_seed(0)
    return Net(*(kind() for kind in middle)).double()


def batch(rows=10):
    torch.manual_seed(1)
    return torch.randn(rows, WIDTH).double(), torch.randn(rows, 3).double()


def own_buffers(model):
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.clone())


def plain(model, x, chunks, target=None):
    """Outputs, or the loss, of the model on each micro-batch; gradients are added."""
    outputs = []
    for part in x.tensor_split(min(chunks, len(x))):
        own_buffers(model)
        outputs.append(model(part))
    found = torch.cat(outputs)
    loss = found.pow(2).sum() if target is None else F.mse_loss(found, target)
    loss.backward()
    return found if target is None else loss


def assert_alike(pipe, model, tight=True):
    exact = {"rtol": 1e-9, "atol": 1e-12} if tight else {}
    for (name, mine), (_, own) in zip(pipe.named_parameters(), model.named_parameters(), strict=True):
        assert (mine.grad is None) == (own.grad is None), name
        if own.grad is not None:
            torch.testing.assert_close(mine.grad, own.grad, **exact, msg=lambda m, n=name: f"{n}: {m}")
    for (name, mine), (_, own) in zip(pipe.named_buffers(), model.named_buffers(), strict=True):
        torch.testing.assert_close(mine, own, **exact, msg=lambda m, n=name: f"{n}: {m}")


def kept_whole(pipe):
    return [opaque.path for opaque in opaques(pipe.build.graph)]


def assert_calls_alike(pipe, model, x, chunks=4):
    """Outputs and gradients of one call."""
    model.zero_grad()
    pipe.zero_grad()
    own = copy.deepcopy(model)
    expected = plain(own, x, chunks)
    found = pipe(x)
    found.pow(2).sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert_alike(pipe, own)


@pytest.mark.parametrize("middle", mostly_slow(BREAKS, [*BREAKS][::2].__contains__))
def test_calls_are_the_models(middle, capsys):
    model = made(middle)
    pipe = fxpipe.compile(model, devices=3, chunks=4, checkpoint="always" if middle is not Branch else "never")
    assert_calls_alike(pipe, model, batch()[0])
    assert kept_whole(pipe) == ["middle.0.inner" if hasattr(model.middle[0], "inner") else "middle.0"]
    pipe.close()


@pytest.mark.parametrize(
    ("middle", "schedule", "chunks", "checkpoint"),
    [
        (Branch, "gpipe", 1, "never"),
        (Counts, "gpipe", 4, "always"),
        (Branch, "1f1b", 4, "except_last"),
        (Frozen, "1f1b", 4, "never"),
        (OwnBackward, "zb-h1", 4, "never"),
        (Packed, "zb-h1", 4, "never"),
    ],
)
def test_steps_are_the_models(middle, schedule, chunks, checkpoint):
    model = made(middle)
    own, (x, target) = copy.deepcopy(model), batch()
    pipe = fxpipe.compile(model, devices=2, chunks=chunks, schedule=schedule, checkpoint=checkpoint)
    for _ in range(2):
        expected = plain(own, x, chunks, target)
        found = pipe.step(x, target=target, loss_fn=F.mse_loss)
        torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-12)
        assert_alike(pipe, own)
    pipe.close()


def test_what_changes_between_calls_is_heeded():
    model, x = made(Branch), batch()[0]
    pipe = fxpipe.compile(model, devices=2, chunks=4)
    assert_calls_alike(pipe, model, x)
    assert_calls_alike(pipe, model, -x)  # another way through
    model.middle[0].fc.weight.requires_grad_(False)
    assert_calls_alike(pipe, model, x)
    model.middle[0].fc = nn.Linear(WIDTH, WIDTH).double()
    assert_calls_alike(pipe, model, x)
    model.middle[0].fc = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).double()
    assert_calls_alike(pipe, model, x)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(
            pipe.float()(x.float()[:4]), torch.cat([model(row) for row in x.float()[:4].split(1)])
        )
    pipe.double()
    pipe.eval()
    assert_calls_alike(pipe, model, x[:1])
    assert_calls_alike(pipe, model, torch.randn(8, 3, WIDTH).double())
    with torch.no_grad():
        torch.testing.assert_close(pipe(x[:4]), torch.cat([model(row) for row in x[:4].split(1)]))
    pipe.close()


def test_one_module_in_several_places_and_tied_weights():
    model = made(Branch, Prints, Branch)
    model.middle[2] = model.middle[0]
    model.middle[1].fc.weight = model.first[0].weight
    pipe = fxpipe.compile(model, devices=3, chunks=4, checkpoint="always", cut=["middle.1", "last"])
    x, target = batch()
    assert_calls_alike(pipe, model, x)
    source = "".join(stage.source for stage in pipe.stages)
    assert re.search(r'self\.middle\[1\]\.with_tensors\(\{"fc\.weight": \w+\}\)\(\w+\)', source)
    model.zero_grad()
    own = copy.deepcopy(model)
    plain(own, x, 4, target)
    pipe.step(x, target=target, loss_fn=F.mse_loss)
    assert_alike(pipe, own)
    pipe.close()


class Drops(Branch):
    def forward(self, x):
        return F.dropout(self.fc(x), 0.5, self.training) if x.sum() > -1e9 + self.fc.weight.sum() else x


def test_random_numbers_do_not_depend_on_stages_and_come_again():
    x, found = batch()[0], []
    for devices, checkpoint in ((1, "never"), (3, "always")):
        pipe = fxpipe.compile(made(Drops), devices=devices, chunks=4, checkpoint=checkpoint)
        torch.manual_seed(7)
        y = pipe(x)
        y.pow(2).sum().backward()
        found.append([y, *(p.grad for p in pipe.parameters())])
        pipe.close()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


class Remembers(Counts):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x) * torch.rand_like(x)


class Alternates(Branch):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.fc(x) * (self.calls % 3) if x.sum() > -1e9 + self.fc.weight.sum() else x


def test_what_remembers_is_not_recomputed():
    model, x = made(Alternates), batch()[0]
    pipe = fxpipe.compile(model, devices=3, chunks=4, checkpoint="always", example_inputs=x)
    assert_calls_alike(pipe, model, x)
    assert "never" in {stage.checkpoint for stage in pipe.build.program.stages}
    assert "always" in {stage.checkpoint for stage in pipe.build.program.stages}
    pipe.close()


def test_learning_leaves_no_trace():
    model, x = made(Remembers), batch()[0]
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    pipe = fxpipe.compile(model, devices=2, chunks=4, example_inputs=x)
    assert torch.equal(state, torch.get_rng_state())
    assert "calls" not in vars(model.middle[0])
    assert all("forward" not in vars(module) for module in model.modules())
    assert all(p.grad is None for p in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    pipe(x)
    assert model.middle[0].calls == 4
    pipe.close()


def test_it_is_said_what_is_opaque_and_why():
    pipe = fxpipe.compile(made(Branch), devices=2, chunks=4)
    with pytest.warns(
        UserWarning, match=r"middle\.0 is kept whole: .* because of test_opaque_submodules.py:\d+  if x.sum\(\) > 0"
    ):
        pipe(batch()[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe(batch()[0][:4])
    assert "opaque: middle.0, kept whole in stage" in pipe.explain()
    source = "".join(stage.source for stage in pipe.stages)
    assert 'opaque = ("middle.0",)' in source
    line = next(i for i, text in enumerate(source.splitlines()) if "self.middle[0](" in text)
    assert "# opaque: test_opaque_submodules.py" in source.splitlines()[line - 1]
    assert "opaque middle.0(" in str(pipe.build.graph)
    pipe.close()


def test_a_saved_package_calls_the_models_own_module(tmp_path):
    model, x = made(Branch), batch()[0]
    pipe = fxpipe.compile(model, devices=2, chunks=4)
    pipe(x)
    pipe.save(tmp_path / "out")
    loaded = fxpipe.load(tmp_path / "out", model)
    assert_calls_alike(loaded, model, x)
    with pytest.raises(fxpipe.errors.PackageError, match=r"middle\.0"):
        fxpipe.load(tmp_path / "out", made())
    loaded.close()
    pipe.close()


class Breaks(Branch):
    """Returns something else if told to."""

    how = "not"

    def forward(self, x):
        y = self.fc(x) if x.sum() > -1e9 + self.fc.weight.sum() else x
        if self.how == "shape":
            return torch.cat([y, y], 1)
        if self.how == "type":
            return y.float()
        if self.how == "write":
            x += 1
        return y


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("shape", r"middle\.0.* returned float64\[3, 12\], where float64\[3, 6\] was expected"),
        ("type", r"returned float32\[3, 6\], where float64\[3, 6\] was expected"),
        ("write", r"writes into what it is given; write x = x \+ 1 in place of x \+= 1"),
    ],
)
def test_another_result_than_was_learnt_is_an_error(how, said):
    model, x = made(Breaks), batch()[0]
    pipe = fxpipe.compile(model, devices=2, chunks=4)
    pipe(x)
    model.middle[0].how = how
    with pytest.raises(RuntimeError, match=said) as error:
        pipe(x)
    assert "micro-batch 0" in "".join(error.value.__notes__)
    model.middle[0].how = "not"
    assert_calls_alike(pipe, model, x)
    pipe.close()


class Makes(Branch):
    """Makes a parameter or a buffer in its first forward."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        if "scale" not in dir(self):
            self.make(self, torch.ones(WIDTH, dtype=x.dtype))
        return super().forward(x) * self.scale


@pytest.mark.parametrize(
    "make",
    [
        lambda self, value: setattr(self, "scale", nn.Parameter(value)),
        lambda self, value: self.register_buffer("scale", value),
    ],
    ids=["parameter", "buffer"],
)
def test_what_forward_makes_is_told(make):
    model, x = made(lambda: Makes(make)), batch()[0]
    with closing(fxpipe.compile(model, devices=2, chunks=4)) as pipe:
        with pytest.raises(RuntimeError, match=r"forward of Makes made 'scale', .* or call the model once before"):
            pipe(x)
        assert_calls_alike(pipe, model, x)


class Adds(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Branch()

    def forward(self, x):
        y = self.inner(x)
        y += 1
        return y


def test_writes_into_what_may_be_an_argument_are_refused():
    model, x = made(Adds), batch()[0]
    with torch.no_grad():
        model.first[0].weight.zero_()
        model.first[0].bias.fill_(1)
    pipe = fxpipe.compile(model, devices=2, chunks=4)
    pipe(x)
    with torch.no_grad():
        model.first[0].bias.fill_(-1)
    with pytest.raises(
        RuntimeError, match=r"returned memory that it was given, which test_opaque_submodules.py:\d+  y \+= 1"
    ):
        pipe(x)
    other = fxpipe.compile(model, devices=2, chunks=4)
    with pytest.raises(fxpipe.errors.CaptureError, match=r"write y = y \+ 1 in place of y \+= 1"):
        other(x)
    pipe.close()
    other.close()


class Top(Net):
    """The break is in the forward of the model itself."""

    def forward(self, x):
        x = super().forward(x)
        return x if x.sum() > 0 else x * 2


@pytest.mark.parametrize("schedule", mostly_slow(["gpipe", "1f1b", "zb-v", "auto"], ("1f1b", "auto").__contains__))
def test_a_model_that_breaks_in_its_own_forward_is_one_op_on_one_stage(schedule, tmp_path):
    torch.manual_seed(0)
    model, (x, target) = Top(Counts()).double(), batch()
    pipe = fxpipe.compile(model, devices=2, chunks=4, schedule=schedule, checkpoint="always")
    said = r"Top is kept whole, and nothing is pipelined: .* because of test_opaque_submodules.py:\d+  .*; move these"
    with pytest.warns(UserWarning, match=said):
        assert_calls_alike(pipe, model, x)
    assert len(pipe.stages) == 1
    assert "opaque: Top, kept whole in stage 0" in pipe.explain()
    assert "self.whole_model(x)" in pipe.stages[0].source
    pipe.save(tmp_path / "out")
    loaded = fxpipe.load(tmp_path / "out", model)
    assert_calls_alike(loaded, model, x)
    own = copy.deepcopy(model)
    own.zero_grad()
    pipe.zero_grad()
    expected = plain(own, x, 4, target)
    torch.testing.assert_close(pipe.step(x, target=target, loss_fn=F.mse_loss), expected.detach())
    assert_alike(pipe, own)
    loaded.close()
    pipe.close()


class Thing:
    def __init__(self, x):
        self.x = x


class ReturnsAThing(Branch):
    def forward(self, x):
        return Thing(self.fc(x) if x.sum() > -1e9 + self.fc.weight.sum() else x)


class TakesAThing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = ReturnsAThing()

    def forward(self, x):
        return self.inner(x).x * 2


def test_what_returns_no_tensors_is_kept_in_what_is_around_it():
    model, x = made(TakesAThing), batch()[0]
    pipe = fxpipe.compile(model, devices=2, chunks=4)
    assert_calls_alike(pipe, model, x)
    assert kept_whole(pipe) == ["middle.0"]
    pipe.close()


class Masked(Branch):
    """What it computes depends on which of its arguments are there."""

    def forward(self, x, mask=None, bias=None):
        x = self.fc(x) if x.sum() > -1e9 + self.fc.weight.sum() else x
        x = x if mask is None else x * mask
        return x if bias is None else x + bias


class Calls(nn.Module):
    """Gives a mask of ones where it is told that it is being compiled."""

    told = staticmethod(torch.compiler.is_compiling)

    def __init__(self):
        super().__init__()
        self.inner = Masked()

    def forward(self, x):
        mask = torch.ones(WIDTH, dtype=x.dtype) if self.told() else None
        return self.inner(x, None, torch.sin(x)) + self.inner(x, torch.cos(x)) + self.inner(x, mask)


class CallsInAnotherWay(Calls):
    told = staticmethod(torch.compiler.is_dynamo_compiling)


class CallsByTwoAnswers(Calls):
    @staticmethod
    def told():
        found = torch.compiler.is_compiling()
        found |= torch.jit.is_tracing()
        return found


@pytest.mark.parametrize(
    ("middle", "kept"),
    [(Calls, "middle.0.inner"), (CallsByTwoAnswers, "middle.0.inner"), (CallsInAnotherWay, "middle.0")],
)
def test_submodules_that_are_called_in_another_way_while_they_are_traced(middle, kept):
    """It once was learnt again and again what the other way returns."""
    pipe = fxpipe.compile(made(middle), devices=2, chunks=4)
    assert_calls_alike(pipe, made(middle), batch()[0])
    assert kept_whole(pipe) == [kept]
    pipe.close()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_what_a_submodule_returns_is_learnt_once(mode, monkeypatch):
    learnt = []
    learning = another_way.learn
    monkeypatch.setattr(another_way, "learn", lambda *args: learnt.append(learning(*args)))
    model, x = made(Branch), batch()[0]
    pipe = fxpipe.compile(model, devices=2, chunks=4)
    expected = plain(model, x, 4)
    with mode():
        torch.testing.assert_close(pipe(x), expected)
    assert learnt == [None]
    pipe.close()


class Detaches(Branch):
    """Returns values with and without a gradient: detached, of whole numbers, what it was given, parameters."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Parameter(torch.linspace(1, 2, WIDTH), requires_grad=False)

    def forward(self, x):
        y = torch.tanh(self.fc(x)) if x.sum() > -1e9 + self.fc.weight.sum() else x
        return y, y.detach(), y.argmax(-1), x, self.frozen.expand_as(x), y.detach().floor() if self.training else y


class Shows(nn.Module):
    """Returns all of it, and what comes of it."""

    def __init__(self, middle, scale):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, WIDTH), middle, nn.Linear(WIDTH, WIDTH)
        self.scale = scale

    def forward(self, x):
        given = x
        y, detached, best, *others = self.middle(torch.tanh(self.first(x)))
        return self.last(y * self.scale(detached, 0.1)), detached * 2, best, others, self.middle(given)


@pytest.mark.parametrize(
    ("devices", "checkpoint"),
    mostly_slow(product((1, 3), ("except_last", "always", "never")), (3, "never").__eq__),
)
def test_what_needs_no_gradient_in_the_model_needs_none_in_the_pipe(devices, checkpoint):
    torch.manual_seed(0)
    model, x = Shows(Detaches(), torch.floor_divide).double(), batch(8)[0]  # which has no derivative
    pipe = fxpipe.compile(model, devices=devices, chunks=4, checkpoint=checkpoint)
    for training, frozen, grad in ((1, 0, 1), (0, 0, 1), (1, 0, 0), (1, 1, 1), (1, 0, 1)):
        model.train(bool(training))
        model.middle.requires_grad_(not frozen)
        model.middle.frozen.requires_grad_(False)
        with torch.set_grad_enabled(bool(grad)):
            wanted = [
                torch.cat(parts) for parts in zip(*(tree_leaves(model(part)) for part in x.chunk(4)), strict=True)
            ]
            found = tree_leaves(pipe(x))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)
            assert one.requires_grad == other.requires_grad
        if grad:
            gradients = [
                torch.autograd.grad(sum(v.sin().sum() for v in values if v.requires_grad), learns(model))
                for values in (found, wanted)
            ]
            torch.testing.assert_close(*gradients)
    pipe.close()


def learns(model):
    return [p for p in model.parameters() if p.requires_grad]


def test_a_gradient_that_comes_on_one_way_only_is_not_lost():
    """What it was learnt from needs no gradient."""
    model, x = Shows(DetachesSome(), torch.div).double(), batch(8)[0]
    x[:2], x[2:] = -x[:2].abs(), x[2:].abs()
    for checkpoint in ("except_last", "always", "never"):
        pipe = fxpipe.compile(model, devices=3, chunks=4, checkpoint=checkpoint)
        gradients = [
            torch.autograd.grad(sum(v.sin().sum() for v in tree_leaves(out) if v.requires_grad), learns(model))
            for out in ([model(part) for part in x.chunk(4)], pipe(x))
        ]
        torch.testing.assert_close(*gradients)
        pipe.close()


class DetachesSome(Branch):
    def forward(self, x):
        y = torch.tanh(self.fc(x))
        return y, y if x.mean() > 0 else y.detach(), y.argmax(-1), x


class Attends(Branch):
    """Does more where a truth, which its caller has from a tensor, says so."""

    def __init__(self):
        super().__init__()
        self.more = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, marked, any_marked):
        y = self.fc(x)
        if any_marked:
            y = y + self.more(x) * marked[:, None]
        return y


class Encodes(nn.Module):
    """Tells all layers whether there is anything for them in a mask, which a buffer may switch off."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Attends() for _ in range(4))
        self.register_buffer("on", torch.tensor(True))

    def forward(self, x, marked):
        any_marked = (marked & self.on).flatten().any().item()
        for layer in self.layers:
            x = torch.tanh(layer(x, marked, any_marked))
        return x


@pytest.mark.parametrize("rows", mostly_slow([[], [5], [*range(8)]], [5].__eq__))
def test_a_truth_that_depends_on_data_is_given_to_what_is_kept_whole(rows):
    """It is another one in each micro-batch. All of the encoder was kept whole before."""
    torch.manual_seed(0)
    model, x, marked = Encodes().double(), batch(8)[0], torch.zeros(8, dtype=torch.bool)
    marked[list(rows)] = True
    pipe = fxpipe.compile(model, devices=3, chunks=4, example_inputs=(x, marked))
    assert (len(kept_whole(pipe)), len(pipe.stages)) == (4, 3)
    for seen in (marked, ~marked):
        outputs = pipe(x, seen), torch.cat([model(*part) for part in zip(x.chunk(4), seen.chunk(4), strict=True)])
        torch.testing.assert_close(*outputs)
        found, wanted = (
            torch.autograd.grad(y.sin().sum(), list(model.parameters()), allow_unused=True, materialize_grads=True)
            for y in outputs
        )
        torch.testing.assert_close(found, wanted)
        model.zero_grad()
        pipe.step(x, seen, loss_fn=lambda y: y.sin().sum())
        for parameter, grad in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(torch.zeros_like(grad) if parameter.grad is None else parameter.grad, grad)
    pipe.close()


class Follows(Branch):
    """Writes a frozen parameter in forward."""

    def __init__(self):
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, x):
        if x.sum() > -1e9 + self.fc.weight.sum():
            self.centre.data.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return self.fc(x) + self.centre


@pytest.mark.parametrize("checkpoint", ["except_last", "always"])
def test_parameters_that_are_written_inside_are_written_once(checkpoint):
    """Learning wrote them, too, and so did recomputation."""
    model, twin, x = made(Follows), made(Follows), batch(8)[0]
    pipe = fxpipe.compile(twin, devices=2, chunks=4, checkpoint=checkpoint, example_inputs=x)
    for run in (lambda: pipe(x).sin().sum().backward(), lambda: pipe.step(x, loss_fn=lambda y: y.sin().sum())):
        model.zero_grad()
        twin.zero_grad()
        run()
        for part in x.chunk(4):
            model(part).sin().sum().backward()
        for one, other in zip(twin.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(one, other)
            torch.testing.assert_close(one.grad, other.grad)
    pipe.close()


LOCK = threading.Lock()


class SetsUp(nn.Module):
    """Hangs a hook on a layer in its first call, under a lock, as libraries do that collect outputs."""

    def __init__(self):
        super().__init__()
        self.layer, self.inner, self.seen = nn.Linear(WIDTH, WIDTH), Branch(), []

    def forward(self, x):
        if not hasattr(self, "ready"):
            with LOCK:
                self.layer.register_forward_hook(lambda module, args, y: self.seen.append(y))
            self.ready = True
        self.seen.clear()
        x = self.inner(self.layer(x))
        return x, self.seen[0]


class SetsUpTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = SetsUp(), SetsUp()

    def forward(self, x):
        x, one = self.first(x)
        x, other = self.second(x)
        return x, one, other


def test_what_is_set_up_after_a_submodule_that_is_kept_whole():
    """Its second half once was kept whole."""
    model, x = SetsUpTwice().double(), batch(8)[0]
    pipe = fxpipe.compile(model, devices=2, chunks=4, example_inputs=x)
    assert kept_whole(pipe) == ["first.inner", "second.inner"]
    assert [len(part.layer._forward_hooks) for part in (model.first, model.second)] == [1, 1]
    for found, *parts in zip(pipe(x), *map(model, x.chunk(4)), strict=True):
        torch.testing.assert_close(found, torch.cat(parts))
    pipe.close()


class RaisesWhenCompiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Branch()

    def forward(self, x):
        if torch.compiler.is_compiling():
            raise RuntimeError("run me as I am")
        return torch.sin(self.inner(x))


def test_a_model_that_raises_where_it_is_told_that_it_is_compiled():
    """It once was refused, as if it raised in any case."""
    pipe = fxpipe.compile(made(RaisesWhenCompiled), devices=2, chunks=4)
    assert_calls_alike(pipe, made(RaisesWhenCompiled), batch()[0])
    assert kept_whole(pipe) == ["middle.0.inner"]
    pipe.close()


class Labels(Branch):
    """Returns an object with a part that is no tensor, which the model returns in turn."""

    def forward(self, x):
        return {"x": self.fc(x) if x.sum() > -1e9 + self.fc.weight.sum() else x, "label": "seen", "width": WIDTH}


class ReturnsLabels(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Labels()
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x):
        found = self.inner(x)
        return {**found, "y": self.last(found["x"])}


def test_what_is_no_tensor_reaches_the_caller():
    torch.manual_seed(0)
    model, x = ReturnsLabels(), torch.randn(8, WIDTH)
    pipe = fxpipe.compile(model, devices=2, chunks=4)
    for _ in range(2):
        found, expected = pipe(x), model(x)
        assert list(found) == list(expected)
        assert (found["label"], found["width"]) == ("seen", WIDTH)
        torch.testing.assert_close(found["y"], expected["y"])
    pipe.close()


def test_a_pipe_with_opaque_ops_is_let_go_of():
    pipe = fxpipe.compile(made(Branch), devices=2, chunks=4)
    pipe(batch()[0])
    gone = weakref.ref(pipe.model)
    pipe.close()
    del pipe
    gc.collect()
    assert gone() is None


class Draws(Branch):
    """Python's random numbers, which no recomputation brings back."""

    def forward(self, x):
        return self.fc(x) * random.random() if x.sum() > -1e9 + self.fc.weight.sum() else x


def test_what_draws_numbers_of_python_is_not_recomputed():
    model, x = made(Draws), batch()[0]
    pipe = fxpipe.compile(model, devices=3, chunks=1, checkpoint="always", example_inputs=x)
    found = []
    for run in (pipe, model):
        model.zero_grad()
        random.seed(0)
        run(x).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*found)
    assert "never" in {stage.checkpoint for stage in pipe.build.program.stages}
    pipe.close()


class Grouped(Branch):
    def forward(self, x):
        groups = x.reshape(-1, 2, WIDTH)
        return super().forward(groups).reshape(-1, WIDTH)


def test_samples_may_come_in_groups():
    model, x = made(Grouped), batch(8)[0]
    pipe = fxpipe.compile(model, devices=3, chunks=2, example_inputs=x)
    assert_calls_alike(pipe, model, x, chunks=2)
    pipe.close()


class Wrapped(nn.Module):
    """A model all of whose arithmetic is in one submodule."""

    def __init__(self):
        super().__init__()
        self.inner = Branch()

    def forward(self, x):
        return {"out": self.inner(x)}


def test_a_submodule_that_is_all_of_the_model_has_one_stage():
    model, x = Wrapped().double(), batch()[0]
    with pytest.warns(
        UserWarning, match=r"nothing is pipelined: inner is kept whole, because of test_opaque_submodules.py:\d+"
    ):
        pipe = fxpipe.compile(model, devices=3, chunks=4, example_inputs=x)
    assert len(pipe.stages) == 1
    torch.testing.assert_close(pipe(x)["out"], torch.cat([model(part)["out"] for part in x.chunk(4)]))
    pipe.close()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_as_many_stages_as_what_is_kept_whole_leaves(schedule):
    model, (x, target) = nn.Sequential(Branch(), nn.Linear(WIDTH, 3)).double(), batch()
    x = x.abs()
    said = r"3 of 4 devices have a stage: 0 is kept whole, because of test_opaque_submodules.py:\d+  if x.sum\(\) > 0"
    pipe = fxpipe.compile(model, devices=4, chunks=2, schedule=schedule)
    with pytest.warns(UserWarning, match=said):
        loss = pipe.step(x, target=target, loss_fn=F.mse_loss)
    assert len(pipe.stages) == 3
    wanted = sum(F.mse_loss(model(part), of) for part, of in zip(x.chunk(2), target.chunk(2), strict=True)) / 2
    torch.testing.assert_close(loss, wanted)
    found = [p.grad for p in model.parameters()]
    torch.testing.assert_close(found, list(torch.autograd.grad(wanted, list(model.parameters()))))
    pipe.close()


def test_too_many_stages_for_what_is_kept_whole():
    model, x = nn.Sequential(Branch(), nn.Linear(WIDTH, WIDTH)).double(), batch()[0]
    said = r"0 is kept whole, because of test_opaque_submodules.py:\d+  if x.sum\(\) > 0 \* .* .* Ask for at most 2"
    with pytest.raises(fxpipe.PlanError, match=said):
        fxpipe.compile(model, devices=3, chunks=4, checkpoint={0}, example_inputs=x)


class Total(Branch):
    def forward(self, x):
        return super().forward(x).sum()


class Totals(Branch):
    def forward(self, x):
        y = super().forward(x)
        return {"sum": y.sum(), "all": y}


@pytest.mark.parametrize("kind", [Total, Totals])
def test_one_value_of_what_is_kept_whole_is_refused_with_its_line(kind):
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), kind()).double(), batch()[0]
    said = r"(?s)1 is kept whole because of test_opaque_submodules.py:\d+  if x.sum\(\) > 0 .*one value over the batch"
    with pytest.raises(fxpipe.CaptureError, match=said):
        fxpipe.compile(model, devices=2, chunks=4, example_inputs=x)


class Picks(Branch):
    """Is given places in an array of numpy's."""

    def forward(self, x, places):
        return super().forward(x[:, places])


class Picked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Picks()

    def forward(self, x):
        return self.inner(x, numpy.array([3, 1, 0, 2, 5, 4]) if x.sum() > -1e9 + self.inner.fc.weight.sum() else None)


def test_what_is_given_an_array_of_numpys_is_kept_whole_with_its_caller():
    model, (x, _) = nn.Sequential(nn.Linear(WIDTH, WIDTH), Picked(), nn.Linear(WIDTH, 3)).double(), batch()
    pipe = fxpipe.compile(model, devices=3, chunks=4, example_inputs=x)
    assert [opaque.path for opaque in opaques(pipe.build.graph)] == ["1"]
    assert_calls_alike(pipe, model, x)
    pipe.close()


class Averages(Counts):
    """Writes buffers, and returns a number over its samples."""

    def forward(self, x):
        return super().forward(x).square().mean()


def test_a_number_of_what_writes_buffers_is_not_the_same_for_all_samples():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Averages()).double(), batch()[0]
    with pytest.raises(fxpipe.CaptureError, match="nothing tells whether it is a mean or a sum over its samples"):
        fxpipe.compile(model, devices=2, chunks=4, example_inputs=x)
    pipe = fxpipe.compile(model, devices=2, chunks=4, reduce="mean")
    own, sizes = copy.deepcopy(model), [len(part) for part in x.tensor_split(4)]
    wanted = 0
    for part, size in zip(x.split(sizes), sizes, strict=True):
        own_buffers(own)
        wanted = wanted + own(part) * size / len(x)
    wanted.backward()
    found = pipe(x)
    found.backward()
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    assert_alike(pipe, own)
    pipe.close()


class FakeFails(nn.Module):
    """Its op runs, but not on fake tensors: torch logs that as an error. Forward catches it, and has another way."""

    def __init__(self):
        super().__init__()
        self.fc, self.lock = nn.Linear(WIDTH, WIDTH), threading.Lock()

    def forward(self, x):
        with self.lock:
            x = self.fc(x)
        try:
            return torch.ops.fxpipe_tests.fake_fails(x) + 1
        except ZeroDivisionError:
            return x + 1


@pytest.fixture(scope="module")
def fake_fails():
    library = torch.library.Library("fxpipe_tests", "DEF")

    def fails(x):
        raise ZeroDivisionError

    library.define("fake_fails(Tensor x) -> Tensor")
    library.impl("fake_fails", lambda x: x.clone(), "CPU")
    library.impl("fake_fails", fails, "Meta")
    yield
    library._destroy()


def test_what_torch_logs_in_a_capture_that_goes_on_is_held_back(fake_fails):
    said = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = said.append
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    try:
        with closing(fxpipe.compile(nn.Sequential(FakeFails(), nn.Linear(WIDTH, 2)), devices=2, chunks=2)) as pipe:
            with torch.no_grad(), contextlib.suppress(fxpipe.FxpipeError):
                pipe(torch.randn(4, WIDTH))
    finally:
        logger.removeHandler(handler)
    assert not said


def test_pieces_of_one_class_share_a_warning():
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), Branch()) for _ in range(5)))
    with warnings.catch_warnings(record=True) as said, closing(fxpipe.compile(layers, devices=2, chunks=2)) as pipe:
        warnings.simplefilter("always")
        pipe(torch.randn(4, WIDTH))
    told = [str(one.message) for one in said if "is kept whole" in str(one.message)]
    assert len(told) == 1
    assert "0.1 is kept whole, as 4 more of its class are: one opaque op" in told[0]


class OnePartEach(nn.Module):
    """Returns the features of all samples, and a tuple or list of those of each, as vision models do."""

    def __init__(self, kind):
        super().__init__()
        self.fc, self.kind = nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x):
        h = torch.tanh(self.fc(x)).repeat_interleave(2, 0)
        count = int(x.isfinite().all().item())  # which ends a trace
        return {"all": h, "each": self.kind(h.split([1 + count] * len(x)))}


class Features(nn.Module):
    """Uses what such a submodule returns of all samples, and hands the rest on; or looks into it."""

    def __init__(self, kind, how):
        super().__init__()
        self.tower, self.head, self.how = OnePartEach(kind), nn.Linear(WIDTH, 2), how

    def forward(self, x):
        found = self.tower(x)
        h = found["all"].unflatten(0, (-1, 2)).sum(1)
        if self.how == "looks":
            h = torch.stack([part.sum(0) for part in found["each"]])
        if self.how == "asks":
            h = 2 * h if isinstance(found["each"], (tuple, list)) else h
        return {"out": self.head(h), "each": found["each"]}


@pytest.mark.parametrize("kind", mostly_slow([tuple, list], [list].__contains__))
@pytest.mark.parametrize("how", ["hands on", "asks", "looks"])
def test_a_list_of_one_part_for_each_sample(kind, how):
    torch.manual_seed(0)
    model, x = Features(kind, how), torch.randn(5, WIDTH)
    pipe = fxpipe.compile(copy.deepcopy(model), devices=1, chunks=2, reduce={"loss": "mean"})
    loss = pipe.step(x, loss_fn=lambda found: found["out"].square().mean())
    expected = model(x)["out"].square().mean()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for path, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, model.get_parameter(path).grad)
    if how == "asks":
        with pytest.raises(fxpipe.CaptureError, match="returns a list that a submodule kept whole has made"):
            pipe(x)


@torch.library.custom_op("fxpipe_opaque::sine", mutates_args=())
def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


@sine.register_fake
def sine_of_known_sizes(x):
    assert x.is_cuda, "sizes are not known"
    return torch.empty_like(x)


sine.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Asserted(nn.Module):
    """Runs an op that asserts something of tensors without data."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return sine(self.fc(x))


class Around(nn.Module):
    """Calls such a module where an error passes through code of its own."""

    def __init__(self, kind):
        super().__init__()
        self.inner, self.kind = Asserted(), kind

    def forward(self, x):
        if self.kind == "try":
            try:
                return self.inner(x)
            except ValueError:
                return x
        with torch.autocast("cpu", enabled=False):
            return self.inner(x)


@pytest.mark.parametrize("kind", ["try", "with"])
def test_what_an_op_asserts_of_sizes_keeps_its_submodule_whole(kind):
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Around(kind), nn.Linear(WIDTH, 2)), torch.randn(6, WIDTH)
    plain = copy.deepcopy(model)
    with closing(fxpipe.compile(model, devices=2, chunks=2)) as pipe:
        with pytest.warns(UserWarning, match=r"torch cannot tell the sizes of what it makes: sizes are not known"):
            loss = pipe.step(x, loss_fn=lambda y: y.square().mean())
    expected = plain(x).square().mean()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)

"""Of equal layers one is traced, and the graph is the one that each layer's trace gives; what changes in a layer is
noticed."""

from __future__ import annotations

import contextvars
import copy
import gc
import re
import weakref
from collections.abc import Callable
from contextlib import closing
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe.capture import CallCapture
from fxpipe.ir.graph.evaluate_graph import evaluate
from fxpipe.ir.graph.graph import Graph
from tests.helpers.marks import mostly_slow

X = torch.randn(6, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LAYERS = 4


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.scale, self.rate, self.act = 0.5, 0.25, F.gelu
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        h = self.act(self.up(self.norm(x.view(b * t, 8))))
        h = F.dropout(self.down(h), self.rate, self.training).view(b, t, -1)
        return x + h * self.scale - self.mean


class Net(nn.Module):
    def __init__(self, layer: Callable[[int], nn.Module] = Layer, layers: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.h = nn.ModuleList(map(layer, range(layers)))
        self.last = nn.Linear(8, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.h:
            x = layer(x)
        return self.last(x)


class Capture(CallCapture):
    """Keeps the last trace."""

    last: Any = None

    def captured(self, traced: Any) -> Any:
        self.last = traced
        return super().captured(traced)


class Counted:
    """Captures of a model, with the number of layers that were copied."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.capture = Capture(model)

    @property
    def copies(self) -> int:
        """How many layers have what was traced for another one, in the last trace."""
        traced = self.capture.last
        calls = traced.placed.calls if traced is not None and traced.placed is not None else ()
        return len(calls) - len({id(call.trace) for call in calls})

    def graph(self, *args: Any) -> Graph:
        return self.capture.capture(args or (X,), {})

    def check(self, *args: Any) -> None:
        """The captured graph computes what a copy of the model does, with its gradients and its draws."""
        plain = copy.deepcopy(self.model)
        args = args or (X,)
        torch.manual_seed(1)
        expected = plain(*args)
        torch.manual_seed(1)
        got = self.capture(args, {}, self.run)
        torch.testing.assert_close(got, expected)
        for result, model in ((expected, plain), (got, self.model)):
            model.zero_grad()
            if result.requires_grad:
                result.sum().backward()
        for (path, one), (_, two) in zip(self.model.named_parameters(), plain.named_parameters(), strict=True):
            assert (one.grad is None) is (two.grad is None), path
            if one.grad is not None:
                torch.testing.assert_close(one.grad, two.grad, msg=path)
        for (path, one), (_, two) in zip(self.model.named_buffers(), plain.named_buffers(), strict=True):
            torch.testing.assert_close(one, two, msg=path)

    def run(self, graph: Graph, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        named = dict(self.model.named_parameters(remove_duplicate=False)) | dict(self.model.named_buffers())
        states = {s.name: named[s.path] if s.kind != "constant" else s.value for s in graph.states}
        values = evaluate(graph, dict(zip([i.name for i in graph.inputs], inputs, strict=True)), states)
        return tuple(values[output.value] for output in graph.outputs)


def each_traced(model: nn.Module, *args: Any) -> Graph:
    """The graph in which each layer was traced."""
    capture = CallCapture(model)
    capture.layers.give_up()
    return capture.capture(args or (X,), {})


def said(graph: Graph) -> list[Any]:
    """A graph in words, without the names of its ops."""
    numbers = {op.name: f"op{number}" for number, op in enumerate(graph.ops)}
    lines = re.sub(r"\w+", lambda word: numbers.get(word[0], word[0]), str(graph)).split("\n")
    states = sorted(line for line in lines if line.startswith(("  parameter", "  buffer")))
    return [states, [line for line in lines if line not in states], [op.origin for op in graph.ops]]


# Models ---------------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """Writes its buffers."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.fc(x))


class InPlace(nn.Module):
    """Writes what it was given, and returns it."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        x += self.shift
        x[:, 0] = x[:, 1] * 2
        return x


class Pair(nn.Module):
    """Gives and takes several values."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor, *, flag: str) -> tuple[Tensor, None, tuple[Tensor, int]]:
        y = self.fc(x) * mask
        return y, None, (y.sum(-1), 3 if flag == "a" else 4)


class Pairs(Net):
    def __init__(self) -> None:
        super().__init__(Pair)

    def forward(self, x: Tensor) -> Tensor:
        mask = x > 0
        total = x.sum(-1)
        for layer in self.h:
            x, _, (part, number) = layer(x, mask, flag="a")
            total = total + part * number
        return x + total[..., None]


class Numbered(Layer):
    """Reads which layer it is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.index + 1)


class Counting(Layer):
    """Changes an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        self.index = self.index + 1
        return super().forward(x) * self.index


class Lines(Net):
    """Calls its layers on lines of their own, from several modules."""

    def forward(self, x: Tensor) -> Tensor:
        a = self.h[0](self.first(x))
        b = self.h[1](a)
        c = self.h[2](a + b)
        return self.last(self.h[3](c) + self.h[0](b))


class Stepped(Net):
    """Tells its layers by an attribute of a shared object how far it is."""

    def __init__(self) -> None:
        super().__init__(lambda index: Telling(index, state))
        self.state = state

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.h):
            self.state.place = place
            x = layer(x)
        return x


class State:
    place = 0


state = State()


class Telling(Layer):
    def __init__(self, index: int, state: State) -> None:
        super().__init__(index)
        self.state = state

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.state.place + 1)


LEVEL: contextvars.ContextVar[int] = contextvars.ContextVar("level", default=0)


class ByContext(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + LEVEL.get()


class Levels(Net):
    """Tells its layers by a context variable how far it is."""

    def __init__(self) -> None:
        super().__init__(ByContext)

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.h):
            token = LEVEL.set(place)
            x = layer(x)
            LEVEL.reset(token)
        return x


class Switched(Net):
    """Calls some layers without gradients, and some with other types."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.h[1](self.h[0](x))
        with torch.no_grad():
            y = self.h[2](x)
        return x + y + self.h[3](x)


class Asking(Layer):
    """Asks which module it is."""

    first: list[nn.Module]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if self is self.first[0] else 3)


class Askings(Net):
    def __init__(self) -> None:
        super().__init__(Asking)
        first = [self.h[0]]
        for layer in self.h:
            layer.first = first


class Appending(Net):
    """Its layers append to a list."""

    def __init__(self) -> None:
        super().__init__(Appender)

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for layer in self.h:
            x = layer(x, seen)
        return x + seen[1]


class Appender(Layer):
    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(x)
        return super().forward(x)


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.h[2].up.weight = self.h[1].up.weight
        self.h[3].norm = self.h[0].norm


class Shared(Net):
    """All layers have one norm."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.h:
            layer.norm = self.h[0].norm


class Typed(Net):
    """Reads a parameter of each layer before it calls the layer."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.h:
            x = layer(x.to(layer.up.weight.dtype))
        return x


class Dense(Net):
    """Its layers are given more and more."""

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.h):
            x = layer(x) if place % 2 else layer(x[:, :3].contiguous())
            x = torch.cat([x, x], 1)[:, :5].contiguous()
        return x


class Ranged(Layer):
    """Makes a tensor of nothing; one of its kind gives a number too."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.odd = index == 2

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x) + torch.arange(8, device=x.device)
        return (y, 1) if self.odd else (y, x)


class Again(Net):
    """The trace begins again when it is at the third layer."""

    def __init__(self) -> None:
        super().__init__(Ranged)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            y, other = layer(x)
            x = y + other if other is x else y
        return x


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # with how many layers are copied
    "layers": (Net, 3),
    "batch norms": (lambda: Net(Normed), 3),
    "in place": (lambda: Net(InPlace), 0),
    "several values": (Pairs, 0),  # it gives a number
    "numbered": (lambda: Net(Numbered), 0),
    "counting": (lambda: Net(Counting), 0),
    "lines": (Lines, 4),
    "stepped": (Stepped, 0),
    "levels": (Levels, 0),
    "switched": (Switched, 0),
    "asking": (Askings, 2),
    "appending": (Appending, 0),
    "checkpointed": (Checkpointed, 2),  # bodies traced apart compute a size again that layers in place share
    "tied": (Tied, 3),
    "shared": (Shared, 3),
    "typed": (Typed, 3),
    "again": (Again, 1),
    "of two sizes": (Dense, 1),
}
QUICK = ("in place", "layers", "several values")


@pytest.mark.parametrize("name", mostly_slow(MODELS, QUICK.__contains__))
def test_the_graph_is_that_of_tracing_each_layer(name: str) -> None:
    make, copies = MODELS[name]
    model = make()
    counted = Counted(model)
    expected = each_traced(model)
    assert said(counted.graph()) == said(expected) or name == "checkpointed"
    assert counted.copies == copies
    assert str(counted.graph()) == str(expected) or name != "layers"
    if name != "counting":  # the plain copy counts too
        counted.check()


# Changes --------------------------------------------------------------------------------------------------------------


def retied(model: Net) -> None:
    model.h[2].up.weight = model.h[1].up.weight


def swapped(model: Net) -> None:
    model.h[1], model.h[2] = model.h[2], model.h[1]


def doubled(layer: Layer, x: Tensor) -> Tensor:
    return 2 * Layer.forward(layer, x)


def patched_forward(model: Net) -> None:
    model.h[2].forward = MethodType(doubled, model.h[2])


def of_other_class(model: Net) -> None:
    model.h[2].__class__ = Numbered


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a number": lambda model: setattr(model.h[2], "scale", 2.0),
    "a number of a submodule": lambda model: setattr(model.h[2].norm, "eps", 0.5),
    "a function": lambda model: setattr(model.h[2], "act", torch.tanh),
    "its mode": lambda model: model.h[2].eval(),
    "a frozen weight": lambda model: model.h[2].up.weight.requires_grad_(False),
    "a submodule": lambda model: setattr(model.h[2], "up", nn.Linear(8, 12).double()),
    "a hook": lambda model: model.h[2].register_forward_hook(lambda module, args, y: y * 2),
    "its forward": patched_forward,
    "its class": of_other_class,
    "the shape of a buffer": lambda model: setattr(model.h[2], "mean", torch.ones(5, 8).double()),
    "a weight": lambda model: setattr(model.h[2].up, "weight", nn.Parameter(torch.randn(12, 8).double())),
    "a tie": retied,
    "the order": swapped,
    "a layer less": lambda model: model.h.__delitem__(2),
    "all": lambda model: [setattr(layer, "scale", 2.0) for layer in model.h],
}


@pytest.mark.parametrize("name", mostly_slow(CHANGES, ().__contains__))
def test_a_change_in_one_layer_is_noticed(name: str) -> None:
    counted = Counted(Net())
    counted.graph()
    assert counted.copies == 3
    CHANGES[name](counted.model)
    counted.check()


class Ordered(Net):
    """Calls its layers in the order of a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.order = list(self.h)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.order:
            x = layer(x)
        return x


@pytest.mark.slow
def test_another_order_of_the_layers_is_noticed() -> None:
    counted = Counted(Ordered())
    counted.graph()
    assert counted.copies == 3
    counted.model.order.reverse()
    counted.check()


@pytest.mark.slow
def test_a_change_of_all_layers_is_no_loss() -> None:
    counted = Counted(Net())
    first = counted.graph()
    counted.model.eval()
    counted.graph()
    counted.model.train()
    assert counted.graph() is first
    assert counted.copies == 3
    counted.model.h[2].index = 17  # which no layer reads
    assert counted.graph() is first


def test_nothing_keeps_the_model() -> None:
    capture = CallCapture(Net())
    capture.capture((X,), {})
    assert capture.layers.by_twin
    roots = capture.model, capture.twins.root
    gone: list[Any] = [weakref.ref(part) for root in roots for part in (*root.modules(), *root.parameters())]
    del roots
    del capture
    gc.collect()
    assert [part() for part in gone] == [None] * len(gone)


class Pieces(nn.Module):
    """Kept whole: returns a list of which only a run tells how many items it has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> list[Tensor]:
        return list(x.split(1 + int((self.weight * x).detach().sum() > 1e9)))


class Joined(Net):
    """Concatenates such a list: torch then runs the trace in a mode in which no guard of a layer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = Pieces().double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(self.pieces(super().forward(x)))


@pytest.mark.filterwarnings("ignore:.* kept whole")
def test_layers_whose_guards_never_hold_are_traced_with_the_model_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    starts, start = list[None](), CallCapture.starts
    monkeypatch.setattr(CallCapture, "starts", lambda self: (starts.append(None), start(self)))
    model = Joined().eval()
    with closing(fxpipe.compile(model, 2, 2)) as pipe:
        for _ in range(2):
            torch.testing.assert_close(pipe(X), model(X))
    assert len(starts) <= 5

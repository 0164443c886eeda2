"""What is known of the ops of layers, and from Dynamo's own runs, is what a run of each op gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxpipe.capture import capture
from fxpipe.capture.tracing import fx_to_graph
from fxpipe.capture.tracing.dynamo import Traced
from fxpipe.capture.tracing.effects import op_effects
from fxpipe.capture.tracing.effects.observed_writes import memory
from fxpipe.capture.tracing.effects.op_effects import Step
from fxpipe.capture.tracing.layers.layer_values import Known
from tests.helpers.marks import mostly_slow
from tests.helpers.models import MODELS

Ran = tuple[dict[fx.Node, Any], list[Step]]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Each graph is run in full, then without the ops of layers, and then as always; the answers must be the same. Of
    each graph: how many ops ran the second time, and how many there are."""
    always, run = op_effects.steps, op_effects._run
    count, found = [0], []

    def counted(node: fx.Node, *args: Any) -> Any:
        count[0] += 1
        return run(node, *args)

    def both(traced: Traced) -> Ran:
        with monkeypatch.context() as patch:
            patch.setattr(op_effects, "recorded", lambda *args: None)
            patch.setattr(op_effects, "_in_layer", lambda traced: {})
            full = _said(*always(traced))
        count[0] = 0
        with monkeypatch.context() as patch:
            patch.setattr(op_effects, "recorded", lambda *args: None)
            known = always(traced)
        assert _said(*known) == full
        found.append((count[0], len(known[1])))
        fast = always(traced)
        assert _said(*fast) == full
        return fast

    monkeypatch.setattr(op_effects, "_run", counted)
    monkeypatch.setattr(fx_to_graph, "steps", both)
    return found


def _said(env: dict[fx.Node, Any], steps: list[Step]) -> list[Any]:
    """All values, by their types, the first node with the same tensor and the first with the same memory; and for each
    op what it writes."""
    homes: dict[int, int] = {}
    objects: dict[int, int] = {}
    values = [_value(env[node], index, homes, objects) for index, node in enumerate(env)]
    order = {node: index for index, node in enumerate(env)}
    return [values, [(s.node, _written(s, order[s.node], homes), s.random, s.regions) for s in steps]]


def _written(step: Step, index: int, homes: dict[int, int]) -> list[int]:
    """The nodes whose memory the op writes; without memory that only the op had, which a later node may have now."""
    return [home for address in step.written if (home := homes.get(address, index + 1)) <= index]


def _value(value: Any, index: int, homes: dict[int, int], objects: dict[int, int]) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value), [_value(item, index, homes, objects) for item in value]
    if not isinstance(value, (Tensor, Known)):
        return type(value), str(value) if isinstance(value, (int, float, torch.SymInt)) else None
    places = [homes.setdefault(address, index) for address in memory(value)]
    if not places:
        return "in a vmap"
    same, like = objects.setdefault(id(value), index), value.like if isinstance(value, Known) else value
    return value.dtype, value.device, _sizes(*like.shape, *like.stride()), value.requires_grad, places, same


def _sizes(*numbers: Any) -> list[Any]:
    """Numbers, and sums of products of symbols."""
    return [number.node.expr.expand() if isinstance(number, torch.SymInt) else number for number in numbers]


QUICK = ("dropout", "in place", "complex")
SLOW = ("lstm", "own function", "mixed precision")


@pytest.mark.parametrize("name", mostly_slow(QUICK + SLOW, QUICK.__contains__))
def test_models(name: str, compared: list[tuple[int, int]]) -> None:
    case = MODELS[name]
    args, kwargs = case.inputs(6)
    capture(case.make().double(), args, kwargs, batch_dim=case.input_dim, reduce="mean")
    assert compared


Body = Callable[[nn.Linear, Tensor], Tensor]


class Layer(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(4, 4), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.fc, x.sin())  # type: ignore[arg-type]


class Layers(nn.Module):
    """Four equal layers."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(body) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).cos()
        return x


def _scaled_in_place(fc: nn.Linear, x: Tensor) -> Tensor:
    h = x.detach().clone()
    before = h[:, :1]
    h.mul_(fc.weight.sum())
    return fc(h + before)


def _turned_in_place(fc: nn.Linear, x: Tensor) -> Tensor:
    h = x + 1
    h.unsqueeze_(1)
    return fc(h.squeeze(1))


def _without_gradient(fc: nn.Linear, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = fc(x).exp()
    return fc(x).exp() * scale


def _in_half(fc: nn.Linear, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = fc(x)
    return fc(x) + low.float()


def _random_or_not(fc: nn.Linear, x: Tensor) -> Tensor:
    return fc(F.dropout(x, 0.5) + F.dropout(x, 0.0) + F.dropout(x, 0.5, training=False))


def _written_without_gradient(fc: nn.Linear, x: Tensor) -> Tensor:
    rows = fc.weight.view(-1)
    fc.weight.data[0].mul_(0.75)
    with torch.no_grad():
        fc.weight[1] += 0.25
    return fc(x) + rows[:4]


def _needs_a_gradient_later(fc: nn.Linear, x: Tensor) -> Tensor:
    h = x.detach() + 1
    before = h.tanh()
    h.mul_(fc.weight.sum())
    return fc(before) + h


BODIES: dict[str, Body] = {
    "views": lambda fc, x: fc(x.t().t().reshape(-1, 2, 2).flatten(1)),
    "split": lambda fc, x: torch.cat([piece.tanh() for piece in fc(x).split(2, dim=1)], dim=1),
    "the tensor itself": lambda fc, x: fc(x.contiguous()),
    "dropout": lambda fc, x: F.dropout(fc(x), 0.5),
    "sizes": lambda fc, x: fc(x).view(x.shape[0] * 2, 2).view(x.shape[0], 4),
    "in place": _scaled_in_place,
    "in place at last": lambda fc, x: fc(x).relu_(),
    "other sizes in place": _turned_in_place,
    "gradient": _without_gradient,
    "autocast": _in_half,
    "probability": _random_or_not,
    "one argument twice": lambda fc, x: fc(torch.add(x, x) + torch.add(x, x + 1)),
    "a number's type": lambda fc, x: fc((x > 0) * 1 + (x > 0) * 1.0 + (x > 0) * True),
    "views of what is written without gradient": _written_without_gradient,
    "a gradient in place": _needs_a_gradient_later,
    "norm": lambda fc, x: F.batch_norm(fc(x), x.new_zeros(4), x.new_ones(4), training=True),
}


@pytest.mark.parametrize("name", mostly_slow(BODIES, [*BODIES][::2].__contains__))
def test_no_op_of_a_layer_runs_again(name: str, compared: list[tuple[int, int]]) -> None:
    capture(Layers(BODIES[name]), (torch.ones(6, 4),))
    ((ran, ops),) = compared
    assert ran == 4  # x.cos()
    assert ops > 4 + 4 * 2


OTHERS: dict[str, Body] = {
    "a part of what it holds": lambda fc, x: fc.bias.expand(x.shape[0], 4),
}


@pytest.mark.parametrize("name", OTHERS)
def test_layers_that_are_traced_with_the_model(name: str, compared: list[tuple[int, int]]) -> None:
    capture(Layers(OTHERS[name]), (torch.ones(6, 4),))
    ((ran, ops),) = compared
    assert ran == ops

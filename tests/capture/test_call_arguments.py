"""Names in `batch_dim`: of a tensor, of a nest that it is in, and of nothing."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.capture import CallCapture
from fxpipe.capture.call_arguments import RequestedCall
from fxpipe.errors import InputError


class Tables(NamedTuple):
    cos: Tensor
    sin: Tensor


class Rope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, rope: Any) -> Tensor:
        cos, sin = (rope["cos"], rope["sin"]) if isinstance(rope, dict) else rope
        return self.last(self.first(x) * cos + x * sin)


COS, SIN = torch.randn(4), torch.randn(1, 4)


@pytest.mark.parametrize(
    ("rope", "batch_dim"),
    [
        ((COS, SIN), {"rope": None}),
        ([COS, SIN], {"rope": None}),
        ({"cos": COS, "sin": SIN}, {"rope": None}),
        (Tables(COS, SIN), {"rope": None}),
        ((COS, torch.randn(6, 4)), {"rope": None, "rope[1]": 0}),
        ((torch.randn(4, 6).t().contiguous(), SIN), {"rope": 0, "rope[1]": None}),
        ((torch.tensor(2.0), torch.randn(6, 4)), {"rope": 0}),
    ],
)
def test_the_name_of_a_nest_is_that_of_all_in_it(rope: Any, batch_dim: dict[str, int | None]) -> None:
    """What is named by itself is as it is named there."""
    torch.manual_seed(0)
    model, x = Rope(), torch.randn(6, 4)
    twin = copy.deepcopy(model)
    pipe = fxpipe.compile(model, 2, 3, batch_dim=batch_dim)
    for net in (pipe, twin):
        net(x, rope).square().sum().backward()
    torch.testing.assert_close(pipe(x, rope), twin(x, rope))
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)
    pipe.close()


@pytest.mark.parametrize("batch_dim", [0, 1])
def test_a_sample_is_captured_as_many_are(batch_dim: int) -> None:
    """Whatever its stride is in dimensions of size one, as one that was cut out of a wider tensor has."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return self.layer(x) * table

    front = CallCapture(Scaled(), {"x": batch_dim, "table": None})
    wide, tables = torch.randn(5, 5, 9), torch.randn(2, 9)
    one = [slice(None), slice(None)]
    one[batch_dim] = slice(1)
    calls = [(wide[(*one, slice(4))], tables[:1, :4]), (wide[..., :4], tables[:1, :8:2]),
             (wide[(*one, slice(4))].contiguous(), tables[1:, 1:5].contiguous())]  # fmt: skip
    graphs = [front.capture(call, {}) for call in calls]
    assert [item.path for item in graphs[0].inputs] == ["x", "table"]
    assert not graphs[0].conditions
    assert all(graph is graphs[0] for graph in graphs)


def test_the_inputs_of_a_call_are_all_that_its_graph_takes() -> None:
    """Also a number that varies, which no tensor of the call tells."""

    class Powers(nn.Module):
        factor = 2.0

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        def forward(self, x: Tensor, power: float = 2) -> Tensor:
            return self.layers(x) * self.factor**power

    model, x = Powers(), torch.randn(4, 4)
    pipe = fxpipe.compile(model, 2, 2)
    for power in (2.0, 3.0, 4.5):
        torch.testing.assert_close(pipe(x, power), model(x, power))
    pipe.prepare(x, 2.5)
    pipe.close()
    front = CallCapture(model)
    for factor in (2.0, 3.0, 4.0):
        model.factor = factor
        graph, values = front.with_inputs(RequestedCall((x,), {}))
    given = dict(zip((item.path for item in graph.inputs), values, strict=True))
    assert given["self.factor"] == 4.0


@pytest.mark.parametrize("name", ["rop", "ropes[0]", "X"])
def test_a_name_that_is_none(name: str) -> None:
    pipe = fxpipe.compile(Rope(), 2, 3, batch_dim={name: None})
    near = "x" if name == "X" else "rope"
    with pytest.raises(InputError, match=rf"batch_dim names '.*', which is no input; .*; did you mean '{near}"):
        pipe(torch.randn(6, 4), (COS, SIN))
    pipe.close()

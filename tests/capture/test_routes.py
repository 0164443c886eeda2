"""The ways to a graph, one after the other, and what is said when none leads there."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.capture import Front
from fxpipe.errors import CaptureError
from fxpipe.ir.opaque import opaques

pytestmark = pytest.mark.filterwarnings("ignore:.*is kept whole")


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        if x.sum() > 0:
            return self.fc(x)
        return x


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(4, 4, batch_first=True)

    def forward(self, x):
        return self.rnn(x)[0]


def test_what_can_be_traced_is_not_kept_whole():
    graph = Front(Recurrent()).capture((torch.randn(6, 3, 4),), {})
    assert opaques(graph) == ()


def test_only_the_submodule_that_breaks_is_kept_whole():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), Branch()), nn.Linear(4, 4))
    graph = Front(model).capture((torch.randn(6, 4),), {})
    (opaque,) = opaques(graph)
    assert opaque.path == "1.1"
    assert opaque.origin.code == "if x.sum() > 0:"
    assert len(graph.ops) == 4


class TopLevel(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        y = self.fc(x)
        if y.sum() > 0:
            return {y}
        return {-y}


def test_a_break_in_the_model_itself_gets_a_table():
    with pytest.raises(CaptureError, match="cannot be captured: which way it goes") as error:
        Front(TopLevel()).capture((torch.randn(6, 4),), {})
    said = str(error.value)
    for part in ("one graph", "if y.sum() > 0:", "torch.where", "TopLevel kept", "what TopLevel returns is no tensor"):
        assert part in said
    assert "test_routes.py" in said.splitlines()[0]


def test_a_break_in_a_loss_function_gets_a_table():
    def loss(y, target):
        if y.sum() > 0:
            return F.mse_loss(y, target)
        return F.l1_loss(y, target)

    pipe = fxpipe.compile(nn.Linear(4, 4), devices=1, chunks=2)
    x = torch.randn(6, 4)
    with pytest.raises(CaptureError, match="move these lines into"):
        pipe.step(x, target=x, loss_fn=loss)
    pipe.close()


def test_a_model_without_values_cannot_be_run_to_learn_what_is_returned():
    with torch.device("meta"):
        model = nn.Sequential(Branch(), nn.Linear(4, 4))
    with pytest.raises(CaptureError, match="running it, to see what"):
        Front(model).capture((torch.randn(6, 4),), {})


class Fails(Branch):
    def forward(self, x):
        if x.max() > 1e3:
            raise KeyError("too large")
        return super().forward(x)


def test_what_the_model_raises_is_the_cause():
    model = nn.Sequential(Fails(), nn.Linear(4, 4))
    front = Front(model)
    with pytest.raises(CaptureError, match="it raises KeyError: 'too large'") as error:
        front.capture((torch.full((6, 4), 1e4),), {})
    assert isinstance(error.value.__cause__, KeyError)
    assert [o.path for o in opaques(front.capture((torch.randn(6, 4),), {}))] == ["0"]


class ItsNumber(nn.Module):
    def forward(self, x):
        return int(x.sum().item()) % 7


class UsesANumber(nn.Module):
    def __init__(self):
        super().__init__()
        self.number = ItsNumber()

    def forward(self, x):
        total = 0
        while total < self.number(x):
            total = total + 1
            x = x * 2
        return {x}


def test_all_that_was_tried_is_in_the_table():
    with pytest.raises(CaptureError) as error:
        Front(UsesANumber()).capture((torch.randn(6, 4),), {})
    assert "What was tried, in order" in str(error.value)

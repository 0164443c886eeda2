"""The ways to a graph, one after the other, and what is said when none leads there."""

from contextvars import ContextVar

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.capture import CallCapture
from fxpipe.errors import CaptureError
from fxpipe.ir.graph.opaque_call import opaques

pytestmark = pytest.mark.filterwarnings("ignore:.*is kept whole")


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        if x.sum() > 0 * self.fc.weight.sum():
            return self.fc(x)
        return x


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(4, 4, batch_first=True)

    def forward(self, x):
        return self.rnn(x)[0]


def test_what_can_be_traced_is_not_kept_whole():
    graph = CallCapture(Recurrent()).capture((torch.randn(6, 3, 4),), {})
    assert opaques(graph) == ()


def test_nobody_measures_guards(monkeypatch):
    """To do so, torch empties the processor's cache, in each capture."""

    def measure(*_):
        raise AssertionError("guards are measured")

    monkeypatch.setattr(torch._dynamo.guards, "profile_guard_manager", measure)
    CallCapture(nn.Linear(4, 4)).capture((torch.randn(6, 4),), {})
    assert torch._dynamo.guards.profile_guard_manager is measure


def test_only_the_submodule_that_breaks_is_kept_whole():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), Branch()), nn.Linear(4, 4))
    graph = CallCapture(model).capture((torch.randn(6, 4),), {})
    (opaque,) = opaques(graph)
    assert opaque.path == "1.1"
    assert opaque.origin.code == "if x.sum() > 0 * self.fc.weight.sum():"
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
        CallCapture(TopLevel()).capture((torch.randn(6, 4),), {})
    said = str(error.value)
    for part in ("one graph", "if y.sum() > 0:", "torch.where", "TopLevel kept", "TopLevel returns a value that is no"):
        assert part in said
    assert "test_routes.py" in said.splitlines()[0]


def test_a_model_without_values_cannot_be_run_to_learn_what_is_returned():
    with torch.device("meta"):
        model = nn.Sequential(Branch(), nn.Linear(4, 4))
    with pytest.raises(CaptureError, match="running it, to see what"):
        CallCapture(model).capture((torch.randn(6, 4),), {})


class Fails(Branch):
    def forward(self, x):
        if x.max() > 1e3:
            raise KeyError("too large")
        return super().forward(x)


def test_what_the_model_raises_is_raised():
    model = nn.Sequential(Fails(), nn.Linear(4, 4))
    call_capture = CallCapture(model)
    with pytest.raises(KeyError, match="too large"):
        call_capture.capture((torch.full((6, 4), 1e4),), {})
    assert [o.path for o in opaques(call_capture.capture((torch.randn(6, 4),), {}))] == ["0"]


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
        CallCapture(UsesANumber()).capture((torch.randn(6, 4),), {})
    assert "What was tried, in order" in str(error.value)


FOUND: ContextVar[list[torch.Tensor] | None] = ContextVar("found", default=None)


class SetsAndLeaves(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        FOUND.set([x])
        return self.fc(x)


class Scales(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        found = FOUND.get()
        return self.fc(x) if found is None else self.fc(x) * len(found)


def test_a_context_variable_is_guarded():
    model, x = Scales(), torch.randn(6, 4)
    pipe = fxpipe.compile(model, devices=1, chunks=2)
    torch.testing.assert_close(pipe(x), model(x))
    token = FOUND.set([x, x, x])
    torch.testing.assert_close(pipe(x), model(x))
    FOUND.reset(token)
    torch.testing.assert_close(pipe(x), model(x))
    pipe.close()


def test_a_context_variable_that_stays_set_is_refused():
    with pytest.raises(CaptureError, match="forward sets the context variable 'found'; reset it in the end"):
        CallCapture(SetsAndLeaves()).capture((torch.randn(6, 4),), {})

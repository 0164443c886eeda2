"""Each capture, plan and search says at once, in the log, what it is and why; and on a terminal what it is at."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.ir.plan.layer_chain import Chain, Layer
from fxpipe.pipe import progress
from fxpipe.pipe.progress import timed, working

CHAIN = Chain("VGG", 8, (Layer("a", 1e-3, 2e-3, 1e6), Layer("b", 1e-3, 2e-3, 1e6)))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# Not fixtures: pytest puts its own in their place when the body of a test begins.
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    return made


def listening(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="fxpipe")
    return caplog


def loss_fn(out: Tensor) -> Tensor:
    return out.square().mean()


def test_captures_say_what_and_why(caplog: pytest.LogCaptureFixture) -> None:
    said = listening(caplog)
    pipe = fxpipe.compile(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.ReLU()), 2, 2)

    def news() -> list[str]:
        found = [message for message in said.messages if message.startswith("capturing")]
        said.clear()
        return found

    x = torch.randn(6, 4)
    pipe(x)
    assert news() == ["capturing Sequential: first call"]
    pipe(x), pipe(x[:4])
    assert news() == []
    pipe(torch.randn(6, 3, 4))
    assert news() == ["capturing Sequential: another shape, input is float32[b, 3, 4] and was float32[b, 4]"]
    pipe.eval()
    pipe(x)
    assert news() == ["capturing Sequential: train to eval"]
    with torch.no_grad():
        pipe(x)
    assert news() == ["capturing Sequential: gradients are off, and were on"]
    pipe.train()
    pipe(x)
    assert news() == []
    pipe.step(x, loss_fn=loss_fn)
    assert news() == ["capturing Sequential with its loss: first step"]
    pipe.model[0].requires_grad_(False)
    pipe(x.requires_grad_())
    assert news() == ["capturing Sequential: something else that the model depends on has changed"]
    with torch.autocast("cpu", torch.bfloat16):
        pipe(x)
    assert news() == ["capturing Sequential: autocast is bfloat16 on cpu, and was off"]
    pipe.close()


class Deciding(nn.Module):
    """Decides in its first call what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4), ""

    def forward(self, x: Tensor) -> Tensor:
        if not self.kind:
            self.kind = "linear"
        return self.layer(x)


def test_a_capture_names_what_forward_has_set_before(caplog: pytest.LogCaptureFixture) -> None:
    said = listening(caplog)
    pipe, x = fxpipe.compile(Deciding(), 1, 2), torch.randn(8, 4)
    pipe(x), pipe(x), pipe(x)
    found = [message for message in said.messages if message.startswith("capturing")]
    assert found == [
        "capturing Deciding: first call",
        "capturing Deciding: something else that the model depends on has changed; forward sets Deciding.kind",
    ]
    pipe.close()


def test_two_arguments_were_one_tensor(caplog: pytest.LogCaptureFixture) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, inputs: Tensor, labels: list[Tensor]) -> Tensor:
            return self.last(self.first(inputs)) - labels[0]

    said, pipe, x, y = listening(caplog), fxpipe.compile(Pair(), 2, 2), torch.randn(6, 4), torch.randn(6, 4)
    pipe(x, [x])
    said.clear()
    pipe(x, [y])
    pipe(y, [y])
    first, *other = [message for message in said.messages if message.startswith("capturing")]
    assert first == "capturing Pair: inputs and labels[0] are not one tensor, and were"
    assert other == []
    pipe.close()


def test_plans_and_searches_say_it_at_once(caplog: pytest.LogCaptureFixture) -> None:
    said = listening(caplog)
    fxpipe.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), 2, 2, example_inputs=torch.ones(4, 4)).close()
    fxpipe.plan(CHAIN, "B", 16)
    assert said.messages == [
        "capturing Sequential: first call",
        "planning Sequential in training, and writing its stages",
        "planning VGG for 16 devices",
    ]
    said.clear()
    fxpipe.search(nn.Linear(4, 4), "k80:2", example_inputs=torch.ones(4, 4), budget=0.1)
    assert said.messages == [
        "capturing Linear: first call",
        "searching a strategy of Linear for 2 devices, for 0.1 s",
    ]


def test_a_terminal_shows_a_line_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch)
    with working("planning UNet"), timed("passes"):
        time.sleep(0.8)
    assert "fxpipe: planning UNet, passes [00:00]" in shown.getvalue()
    assert shown.getvalue().split("\r")[-1].strip() == "", "nothing stays of it"


def test_a_limit_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch)
    with working("planning UNet", seconds=10):
        time.sleep(0.8)
    assert "of 10 s |" in shown.getvalue()


def test_what_is_short_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch)
    before = threading.active_count()
    with working("planning UNet"):
        pass
    assert "planning" not in shown.getvalue()
    assert threading.active_count() <= before


def test_parts_of_something_are_in_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch)
    with working("planning UNet"), working("capturing UNet"):
        time.sleep(0.8)
    assert "capturing" not in shown.getvalue()


def test_who_does_not_lead_says_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    shown, said = terminal(monkeypatch), listening(caplog)
    with working("planning UNet", leads=False):
        time.sleep(0.8)
    assert not said.messages
    assert not shown.getvalue()


def test_an_error_ends_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"), working("planning UNet"), timed("passes"):
            raise ValueError("no")
    with working("planning UNet"):
        time.sleep(0.8)
    assert "passes" not in shown.getvalue()


def test_elsewhere_only_long_work_has_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert progress.LATE < 1
    before = threading.active_count()
    with working("planning UNet"):
        pass
    assert not capsys.readouterr().err
    assert threading.active_count() <= before
    monkeypatch.setattr(progress, "LATE", 0.05)
    with working("planning UNet"), working("capturing UNet: first call"):
        time.sleep(0.8)
    assert capsys.readouterr().err == "fxpipe: planning UNet\n", "one plain line"


@pytest.mark.parametrize(("level", "leads"), [(logging.INFO, True), (logging.ERROR, True), (logging.WARNING, False)])
def test_elsewhere_a_line_can_be_hidden(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, level: int, leads: bool
) -> None:
    monkeypatch.setattr(progress, "LATE", 0.01)
    logger = logging.getLogger("fxpipe")
    before = logger.level
    logger.setLevel(level)
    try:
        with working("planning UNet", leads=leads):
            time.sleep(0.2)
    finally:
        logger.setLevel(before)
    assert not capsys.readouterr().err

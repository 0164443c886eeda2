"""What a message says to write instead is tried: one that is refused, or in which a submodule is kept whole; and the
same one with that remedy, whose steps have to be the plain model's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import CaptureError, InputError

WIDTH = 4
X, Y = torch.randn(2, 4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Part(nn.Module):
    """`body(self, h, *given)` is its forward."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body, self.fc, self.depth = body, nn.Linear(WIDTH, WIDTH), 2
        self.plain = torch.zeros(WIDTH, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.register_buffer("count", torch.tensor(2))

    def forward(self, h: Tensor, *given: Any) -> Any:
        return self.body(self, h, *given)


class Net(nn.Module):
    """A part between two layers; `join(self, h, *given)` is what comes after the first one."""

    def __init__(
        self,
        body: Callable[..., Any] = lambda self, h: self.fc(h),
        join: Callable[..., Any] = lambda self, h, *given: self.last(self.part(h, *given)),
    ) -> None:
        super().__init__()
        self.join = join
        self.first, self.part, self.last = nn.Linear(WIDTH, WIDTH), Part(body), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *given: Any) -> Any:
        join = self.join  # by no name that leads to it again: it stands for lines of forward's own
        return join(self, torch.tanh(self.first(x)), *given)


class Step(NamedTuple):
    """A step of a pipe: of `model()`, with these arguments and options."""

    model: Callable[[], nn.Module] = Net
    given: tuple[Any, ...] = ()
    loss_fn: Callable[..., Any] = F.mse_loss
    x: Any = X
    target: Tensor = Y
    options: Mapping[str, Any] = {}

    def made(self) -> nn.Module:
        """The model, with the same weights each time."""
        torch.manual_seed(0)
        return self.model().double()

    def run(self, model: nn.Module) -> Tensor:
        """The loss of a step of the pipe of a model, which gets its gradients."""
        with closing(fxpipe.compile(model, **{"devices": 2, "chunks": 2, **self.options})) as pipe:
            return pipe.step(self.x, *self.given, target=self.target, loss_fn=self.loss_fn)


def refused(step: Step) -> str:
    """What is said of a step that is refused, or in which something is kept whole."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            step.run(step.made())
        except (CaptureError, InputError) as error:
            return f"{error}"
    kept = [str(one.message) for one in told if "is kept whole" in str(one.message)]
    assert kept, "it is neither refused nor kept whole"
    return kept[0]


def steps_right(step: Step, kept: bool = False) -> None:
    """Assert that a step has the plain model's loss and gradients, without a warning that samples are mixed, or that
    something is kept whole, unless it is to be `kept`."""
    model, plain = step.made(), step.made()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = step.run(model)
    assert not [one for one in told if issubclass(one.category, fxpipe.errors.MixedSamplesWarning)]
    assert any("is kept whole" in str(one.message) for one in told) == kept
    wanted = step.loss_fn(plain(step.x, *step.given), step.target)
    wanted.backward()
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-9, atol=1e-12)
    pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
    for (name, one), two in pairs:
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: name + text)


class Case(NamedTuple):
    """Parts of a message, in order; a step that gets it; the step with what the message says. `line`: whether a line is
    named; `kept`: whether something is kept whole even so."""

    said: tuple[str, ...]
    before: Step
    after: Step
    line: bool = True
    kept: bool = False


def check(case: Case, file: str) -> None:
    """Assert that the message has its parts and the user's line, and that the remedy works."""
    said = refused(case.before)
    at = -1
    for part in case.said:
        assert part in said[at + 1 :], f"{part!r} is not in {said!r}"
        at = said.index(part, at + 1)
    assert not case.line or f"{file}:" in said
    steps_right(case.after, case.kept)


def cases(table: Mapping[str, Case], slow: Collection[str] = ()) -> pytest.MarkDecorator:
    """Runs a test for each case; those of these names are marked as slow."""
    assert table.keys() >= set(slow), "each is the name of a case"
    marks = {name: [pytest.mark.slow] if name in slow else [] for name in table}
    params = [pytest.param(case, id=name, marks=marks[name]) for name, case in table.items()]
    return pytest.mark.parametrize("case", params)

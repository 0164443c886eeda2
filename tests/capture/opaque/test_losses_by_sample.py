"""Loss functions that go through samples one by one, in a way that cannot be traced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.capture.opaque.losses_by_sample import how_reduced
from fxpipe.errors import CaptureError
from tests.helpers.marks import mostly_slow

Loss = Callable[..., Any]
SHOWN: dict[Loss, str] = {}
HIDDEN: list[Loss] = []
SCALE = 2.0


def shows(how: str) -> Callable[[Loss], Loss]:
    def add(loss: Loss) -> Loss:
        SHOWN[loss] = how
        return loss

    return add


def hides(loss: Loss) -> Loss:
    HIDDEN.append(loss)
    return loss


def matched(cost: Any) -> list[int]:
    """For each row the column that is its own, the cheapest first: what no trace can follow."""
    taken: list[int] = []
    for row in np.asarray(cost):
        taken.append(next(int(column) for column in row.argsort() if column not in taken))
    return taken


@shows("mean")
def listed(out: Tensor, target: Tensor) -> Tensor:
    """The pairs of each sample."""
    terms = []
    for o, t in zip(out, target, strict=True):
        order = matched(torch.cdist(o.detach()[:, None], t[:, None]))
        terms.append(F.mse_loss(o, t[order]))
    return torch.stack(terms).mean()


@shows("sum")
def added(out: Tensor, target: Tensor) -> Tensor:
    total = 0
    for o, t in zip(out, target):  # noqa: B905
        far, scale = (-o.detach()).argsort().tolist(), SCALE
        total = total + F.l1_loss(o[far], t) * scale
    return total  # type: ignore[return-value]


@shows("sum")
def by_values(out: Tensor, target: Tensor) -> Tensor:
    """What a trace can follow, for one batch: it reads the values of an input."""
    total = 0
    for o, t in zip(out, target, strict=True):
        best = 1 + int(t.argmax())
        total = total + F.mse_loss(o[:best], t[:best])
    return total  # type: ignore[return-value]


@shows("mean")
def shared(out: Tensor, target: Tensor) -> Tensor:
    total = 0.0
    for o, t in zip(out, target, strict=True):
        best = [int(x) for x in o.detach().numpy().argsort()]
        total += F.mse_loss(o[best], t)
    return total / len(out)


@shows("mean")
def in_one(out: Tensor, target: Tensor) -> Tensor:
    return torch.stack(
        [F.mse_loss(o[o.detach().argsort().tolist()], t) for o, t in zip(out, target, strict=True)]
    ).mean()


@shows("mean")
def of_a_sum(out: Tensor) -> Tensor:
    return sum(o[o.detach().argsort().tolist()][0] ** 2 for o in out) / len(out)  # type: ignore[no-any-return]


@hides
def carried(out: Tensor, target: Tensor) -> Tensor:
    """Samples before decide."""
    terms, before = [], 0.0
    for o, t in zip(out, target, strict=True):
        terms.append(F.mse_loss(o, t) * (1 + before))
        before = float(o.detach()[0] > 0)
    return torch.stack(terms).mean()


@hides
def carried_by_name(out: Tensor, target: Tensor) -> Tensor:
    terms = []
    for o, t in zip(out, target, strict=True):
        terms.append(F.mse_loss(o, t) * (last if len(terms) else 1))  # type: ignore[has-type]  # noqa: F821
        last = float(o.detach()[0])  # noqa: F841
    return torch.stack(terms).mean()


@hides
def of_all(out: Tensor, target: Tensor) -> Tensor:
    terms = []
    for o, t in zip(out, target, strict=True):
        terms.append(F.mse_loss(o, t) / float(out.detach().abs().max()))
    return torch.stack(terms).mean()


@hides
def not_all(out: Tensor, target: Tensor) -> Tensor:
    terms = []
    for o, t in zip(out, target, strict=True):
        if float(o.detach()[0]) > -9:
            terms.append(F.mse_loss(o, t))
    return torch.stack(terms).mean()


@hides
def numbered(out: Tensor, target: Tensor) -> Tensor:
    terms = []
    for i, (o, t) in enumerate(zip(out, target, strict=True)):
        terms.append(F.mse_loss(o, t) * (i + int(o.detach()[0] > 0)))
    return torch.stack(terms).mean()


@hides
def with_a_root(out: Tensor, target: Tensor) -> Tensor:
    terms = []
    for o, t in zip(out, target, strict=True):
        terms.append(F.mse_loss(o[o.detach().argsort().tolist()], t))
    return torch.stack(terms).mean().sqrt()


@hides
def two_of_each(out: Tensor, target: Tensor) -> Tensor:
    terms = []
    for o, t in zip(out, target, strict=True):
        terms.append(F.mse_loss(o[o.detach().argsort().tolist()], t))
        terms.append(o.square().sum())
    return torch.stack(terms).mean()


@hides
def turned(out: Tensor, target: Tensor) -> Tensor:
    terms = []
    for o, t in zip(out, target.flip(0), strict=True):
        terms.append(F.mse_loss(o[o.detach().argsort().tolist()], t))
    return torch.stack(terms).mean()


SEEN: list[Tensor] = []


@hides
def remembered(out: Tensor, target: Tensor) -> Tensor:
    terms = []
    for o, t in zip(out, target, strict=True):
        SEEN.append(o)
        terms.append(F.mse_loss(o, t) / len(SEEN))
    return torch.stack(terms).mean()


@hides
def kept_elsewhere(out: Tensor, target: Tensor) -> Tensor:
    terms = []
    for o, t in zip(out, target, strict=True):
        SEEN[0] = o
        terms.append(F.mse_loss(o, t))
    return torch.stack(terms).mean()


@hides
def early(out: Tensor, target: Tensor) -> Tensor:
    terms = []
    for o, t in zip(out, target, strict=True):
        terms.append(F.mse_loss(o, t))
        if float(o.detach()[0]) > 9:
            break
    return torch.stack(terms).mean()


def named(loss: Loss) -> str:
    return loss.__name__


@pytest.mark.parametrize("loss", SHOWN, ids=named)
def test_the_code_shows_how_it_is_reduced(loss: Loss) -> None:
    assert how_reduced(loss) == SHOWN[loss]


@pytest.mark.parametrize("loss", HIDDEN, ids=named)
def test_the_code_does_not_show_it(loss: Loss) -> None:
    assert how_reduced(loss) is None


@pytest.mark.parametrize(
    "loss", [torch.mean, nn.MSELoss(), lambda out: out.mean(), max], ids=["op", "module", "λ", "max"]
)
def test_other_functions_show_nothing(loss: Any) -> None:
    assert how_reduced(loss) is None


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()


WAYS: list[dict[str, Any]] = [
    {"chunks": 3, "schedule": "1f1b"},
    {"chunks": 2, "schedule": "zb-h1", "checkpoint": "never"},
    {"chunks": 4, "schedule": "gpipe", "checkpoint": "always"},
    {"chunks": 3, "schedule": "1f1b", "backward": "code"},
]


@pytest.mark.filterwarnings("ignore:loss_fn is kept whole")
@pytest.mark.parametrize(
    "options",
    mostly_slow(WAYS, WAYS[::3].__contains__),
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize("loss", mostly_slow(SHOWN, lambda loss: loss is listed), ids=named)
def test_steps_are_the_models(loss: Loss, options: dict[str, Any]) -> None:
    ours = model()
    plain = copy.deepcopy(ours)
    with closing(fxpipe.compile(ours, 2, **options)) as pipe:
        for rows in (7, 7, 9):
            x, target = torch.randn(rows, 6, dtype=torch.float64), torch.randn(rows, 5, dtype=torch.float64)
            targets = {} if loss is of_a_sum else {"target": target}
            expected = loss(plain(x), *targets.values())
            expected.backward()
            found = pipe.step(x, loss_fn=loss, **targets)
            torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-9)
            for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.filterwarnings("ignore:loss_fn is kept whole")
@pytest.mark.parametrize("loss", [with_a_root, two_of_each], ids=named)
def test_what_is_not_shown_is_computed_for_the_whole_batch(loss: Loss) -> None:
    x, target = torch.randn(6, 6, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
    ours = model()
    plain = copy.deepcopy(ours)
    expected = loss(plain(x), target)
    expected.backward()
    with closing(fxpipe.compile(ours, 2, 2)) as pipe:
        torch.testing.assert_close(pipe.step(x, target=target, loss_fn=loss), expected.detach())
        assert pipe.build.graph.epilogue is not None
    torch.testing.assert_close([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])


def test_samples_that_depend_on_the_one_before_are_refused() -> None:
    x, target = torch.randn(6, 6, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
    with (
        closing(fxpipe.compile(model(), 2, 2)) as pipe,
        pytest.raises(CaptureError, match=r"test_losses_by_sample.py:\d+"),
    ):
        pipe.step(x, target=target, loss_fn=carried)

"""Losses of which a part is no sum or mean over the samples, as those of models with experts: the rest stays exact."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import CaptureError
from tests.helpers.layer_behind import LayerBehind
from tests.helpers.marks import mostly_slow

IDS = torch.arange(40).reshape(8, 5) % 11
LABELS = IDS.masked_fill((torch.arange(8) < 5)[:, None] & (torch.arange(5) > 1), -100)  # micro-batches differ in labels


class Routed(nn.Module):
    """Returns cross entropy, and how evenly its router spreads the batch over experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gate, self.head = nn.Embedding(11, 8), nn.Linear(8, 4), nn.Linear(8, 11)

    def forward(self, ids: Tensor, labels: Tensor, count: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embed(ids)
        routed = self.gate(x).softmax(-1)
        chosen = F.one_hot(routed.argmax(-1), 4).float()
        balance = (chosen.mean((0, 1)) * routed.mean((0, 1))).sum() * 4
        scores = self.head(x * routed.amax(-1, keepdim=True)).flatten(0, 1)
        loss = F.cross_entropy(scores, labels.flatten(), reduction="mean" if count is None else "sum")
        if count is not None:
            loss = loss / count
        loss += 0.5 * balance.to(loss.device)
        return {"loss": loss, "balance": balance}


class Paired(Routed):
    """The part mixes the samples."""

    def forward(self, ids: Tensor, labels: Tensor, count: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embed(ids)
        flat = self.gate(x).mean(1)
        balance = (flat @ flat.t()).square().mean()
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + 0.5 * balance
        return {"loss": loss, "balance": balance}


def expected(model: nn.Module, chunks: int, **given: Any) -> Tensor:
    """The loss of the batch, with the mean of the micro-batches' own parts in place of the batch's."""
    whole = model(IDS, LABELS, **given)
    cut = zip(IDS.chunk(chunks), LABELS.chunk(chunks), strict=True)
    part = sum(model(ids, labels, **given)["balance"] for ids, labels in cut) / chunks
    return whole["loss"] + 0.5 * (part - whole["balance"])


@pytest.mark.filterwarnings("error::fxpipe.MixedSamplesWarning")
@pytest.mark.parametrize(
    "reduce", mostly_slow([{"balance": "mean"}, "mean", {"loss": "mean"}], lambda way: way != "mean"), ids=str
)
@pytest.mark.parametrize("given", [{}, {"count": torch.tensor(25)}], ids=["mean", "count"])
@pytest.mark.parametrize("kind", ["step", "call"])
@pytest.mark.parametrize("make", [Routed, Paired])
def test_only_the_part_is_that_of_micro_batches(make: Any, kind: str, given: Any, reduce: Any) -> None:
    if kind == "call" and reduce == {"loss": "mean"}:
        reduce = "mean"  # a call has no loss
    if make is Paired and (given or reduce != {"balance": "mean"}):
        pytest.skip("what mixes samples is named")
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    loss = expected(plain, 4, **given)
    loss.backward()
    schedule = {"schedule": "1f1b"} if kind == "step" else {}
    pipe = fxpipe.compile(model, devices=2, chunks=4, reduce=reduce, **schedule)
    if kind == "step":
        got = pipe.step(IDS, labels=LABELS, **given)
    else:
        got = pipe(IDS, labels=LABELS, **given)["loss"]
        got.backward()
    torch.testing.assert_close(got, loss)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    pipe.close()


def test_a_sum_of_parts() -> None:
    torch.manual_seed(0)
    plain = Routed()
    pipe = fxpipe.compile(copy.deepcopy(plain), devices=2, chunks=4, schedule="1f1b", reduce={"balance": "sum"})
    whole = plain(IDS, LABELS)
    parts = sum(plain(*cut)["balance"] for cut in zip(IDS.chunk(4), LABELS.chunk(4), strict=True))
    torch.testing.assert_close(
        pipe.step(IDS, labels=LABELS), whole["loss"] + 0.5 * (parts - whole["balance"]), check_stride=False
    )
    pipe.close()


def test_the_error_names_the_part() -> None:
    pipe = fxpipe.compile(Routed(), devices=2, chunks=4, schedule="1f1b")
    with pytest.raises(CaptureError, match=r"for this part of it alone, reduce=\{'balance': 'mean'\}"):
        pipe.step(IDS, labels=LABELS)
    pipe.close()


def test_a_whole_loss_that_is_unknown_stays_what_was_said() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    pipe = fxpipe.compile(copy.deepcopy(net), devices=2, chunks=4, schedule="1f1b", reduce="mean")
    got = pipe.step(x, target=y, loss_fn=lambda output, target: (output - target).square().max())
    want = sum((net(i) - j).square().max() for i, j in zip(x.chunk(4), y.chunk(4), strict=True)) / 4
    torch.testing.assert_close(got, want.detach())
    pipe.close()


def test_a_quotient_of_sums_over_the_batch() -> None:
    """As Dice over a batch."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x, y = torch.randn(8, 4), torch.randn(8, 2)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return (1 - 2 * (output * target).sum() / (output.square().sum() + target.square().sum())).mean()

    pipe = fxpipe.compile(copy.deepcopy(net), devices=2, chunks=4)
    expected = loss_fn(net(x), y)
    torch.testing.assert_close(pipe.step(x, target=y, loss_fn=loss_fn), expected.detach())
    expected.backward()
    torch.testing.assert_close([p.grad for p in pipe.parameters()], [p.grad for p in net.parameters()])
    with pytest.raises(CaptureError, match=r"for that of the whole batch, .* loss_fn\(pipe\(x\), y\).backward\(\)"):
        pipe.step(x, target=y, loss_fn=LayerBehind(loss_fn, torch.float32))
    pipe.close()

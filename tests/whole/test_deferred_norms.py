"""Running statistics of the whole batch, wherever a norm is and however it is called, beside the plain model's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import PlanError
from tests.helpers.marks import mostly_slow


def kept_whole(x: Tensor) -> None:
    """A line that cannot be traced."""
    if x.sum().item() > 1e9:
        raise ValueError


class Whole(nn.Module):
    """Submodules that are kept whole."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        kept_whole(x)
        y: Tensor = self.parts(x)
        return y


class Twice(nn.Module):
    def __init__(self, norm: nn.Module, whole: bool = False) -> None:
        super().__init__()
        self.norm, self.fc, self.whole = norm, nn.Linear(6, 6), whole

    def forward(self, x: Tensor) -> Tensor:
        if self.whole:
            kept_whole(x)
        y: Tensor = self.norm(x) + self.norm(self.fc(x))  # no norm sees what another has normalised
        return y


class Older(nn.BatchNorm1d):
    """Counts in another way, and has a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked = self.num_batches_tracked + 1
        return F.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, True, self.momentum or 0.1, self.eps
        )


class Uncounted(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return F.batch_norm(input, self.running_mean, self.running_var, None, None, True, 0.3)


class ByHand(nn.Module):
    """No BatchNorm, but buffers that F.batch_norm updates."""

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        if self.whole:
            kept_whole(x)
        return F.batch_norm(x, self.mean, self.var, training=True, momentum=0.2)


class Images(nn.Module):
    """Samples of 6 numbers as 2 channels of 3."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x.view(-1, 2, 3))
        return y.flatten(1)


class SometimesNormed(nn.Module):
    """The data decides whether the norm runs: in the last micro-batches alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        if x.mean().item() > 0:
            y: Tensor = self.norm(x)
            return y
        return x * 1


KINDS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.BatchNorm1d(6),
    "cumulative": lambda: nn.BatchNorm1d(6, momentum=None),
    "without weights": lambda: nn.BatchNorm1d(6, affine=False),
    "synchronized": lambda: nn.SyncBatchNorm(6),
    "kept whole": lambda: Whole(nn.BatchNorm1d(6)),
    "cumulative, kept whole": lambda: Whole(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None)),
    "twice": lambda: Twice(nn.BatchNorm1d(6)),
    "cumulative, twice": lambda: Twice(nn.BatchNorm1d(6, momentum=None)),
    "twice, kept whole": lambda: Twice(nn.BatchNorm1d(6), whole=True),
    "own forward": lambda: Older(6),
    "own forward, kept whole": lambda: Whole(Older(6)),
    "own forward without a count": lambda: Uncounted(6),
    "by hand": ByHand,
    "by hand, kept whole": lambda: ByHand(whole=True),
    "instances": lambda: Images(nn.InstanceNorm1d(2, track_running_stats=True)),
    "instances, kept whole": lambda: Whole(Images(nn.InstanceNorm1d(2, track_running_stats=True, affine=True))),
}
WAYS = [(kind, way) for kind in KINDS for way in ("call", "step")]
IN_TURN = (*WAYS[::8], *WAYS[3::8])  # every other kind, in one way


def batch(turn: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(turn)
    x = torch.randn(17, 6, dtype=torch.float64, generator=generator)
    return x * torch.arange(1, 18)[:, None] + 3


def made(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), KINDS[kind](), nn.Linear(6, 6)).double()


def assert_same_buffers(model: nn.Module, plain: nn.Module) -> None:
    for name, wanted in plain.named_buffers():
        torch.testing.assert_close(
            model.get_buffer(name), wanted, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


def run(pipe: Any, x: Tensor, way: str) -> None:
    if way == "step":
        pipe.step(x, target=torch.zeros_like(x), loss_fn=F.mse_loss)
    else:
        F.mse_loss(pipe(x), torch.zeros_like(x)).backward()


@pytest.mark.filterwarnings("ignore:.*is kept whole")
@pytest.mark.parametrize(("kind", "way"), mostly_slow(WAYS, IN_TURN.__contains__))
def test_running_statistics_are_those_of_the_whole_batch(kind: str, way: str) -> None:
    """Also of the second batch, whose statistics begin with those of the first, and where forward runs twice."""
    model, plain = made(kind), made(kind)
    pipe = fxpipe.compile(model, ["cpu", "cpu"], 4, deferred_batch_norm=True, checkpoint="always")
    for turn in range(2):
        plain(batch(turn))
        run(pipe, batch(turn), way)
        assert_same_buffers(model, plain)
    pipe.close()


@pytest.mark.filterwarnings("ignore:.*is kept whole")
@pytest.mark.parametrize("kind", ["cumulative", "kept whole", "twice", "instances"])
def test_over_replicas(kind: str) -> None:
    model, plain = made(kind), made(kind)
    x = batch()[:16]
    pipe = fxpipe.compile(model, 4, 2, replicas=(2, 2), deferred_batch_norm=True)
    pipe.step(x, target=x, loss_fn=F.mse_loss)
    plain(x)
    assert_same_buffers(model, plain)
    pipe.close()


@pytest.mark.filterwarnings("ignore:.*is kept whole")
@pytest.mark.parametrize("kind", ["cumulative", "twice", "instances", "twice, kept whole"])
def test_a_saved_package_defers_too(kind: str, tmp_path: Any) -> None:
    model, plain = made(kind), made(kind)
    pipe = fxpipe.compile(model, ["cpu", "cpu"], 4, deferred_batch_norm=True)
    pipe.prepare(batch())
    pipe.save(tmp_path)
    pipe.close()
    loaded = fxpipe.load(tmp_path, model)
    loaded(batch())
    plain(batch())
    assert_same_buffers(model, plain)
    loaded.close()


@pytest.mark.filterwarnings("ignore:.*is kept whole")
def test_a_norm_that_only_some_micro_batches_reach_has_seen_those() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(SometimesNormed(), nn.Linear(6, 6)).double()
    norm = copy.deepcopy(model[0].norm)
    x = torch.cat([torch.randn(8, 6) - 9, torch.randn(8, 6) + 9]).double()
    pipe = fxpipe.compile(model, ["cpu", "cpu"], 4, deferred_batch_norm=True)
    pipe.step(x, target=x, loss_fn=F.mse_loss)
    norm(x[8:])
    assert_same_buffers(model[0].norm, norm)
    pipe.close()


@pytest.mark.filterwarnings("ignore:.*is kept whole")
def test_a_failed_step_leaves_nothing_behind() -> None:
    model, plain = made("twice, kept whole"), made("twice, kept whole")
    pipe = fxpipe.compile(model, ["cpu", "cpu"], 4, deferred_batch_norm=True)

    def fails(grad: Tensor) -> Tensor:
        raise ArithmeticError

    x = batch().requires_grad_()
    run(pipe, x, "step")
    hook = model[2].weight.register_hook(fails)
    with pytest.raises(ArithmeticError):
        run(pipe, x, "step")
    hook.remove()
    plain.load_state_dict(model.state_dict())
    run(pipe, batch(1), "step")
    plain(batch(1))
    assert_same_buffers(model, plain)
    pipe.close()


class Averaging(nn.BatchNorm1d):
    """Changes its running mean by itself."""

    def forward(self, input: Tensor) -> Tensor:
        mean = input.mean(0)
        with torch.no_grad():
            self.running_mean.mul_(0.9).add_(mean * 0.1)
        return input * self.weight


class Adding(nn.BatchNorm1d):
    """Reads its counter while the batch runs."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.num_batches_tracked


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Averaging, r"op .*, at test_deferred_norms.py:\d+ .*changes 1.running_mean itself"),
        (Adding, r"op .*, at test_deferred_norms.py:\d+ .*reads the counter .*num_batches_tracked"),
    ],
)
def test_refuses_statistics_that_cannot_be_deferred(kind: Any, message: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), kind(6), nn.Linear(6, 6)).double()
    pipe = fxpipe.compile(model, ["cpu", "cpu"], 4, deferred_batch_norm=True)
    with pytest.raises(PlanError, match=message):
        pipe(batch())


class Elsewhere(nn.Module):
    """Updates a copy of its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        kept_whole(x)
        mean = self.mean.clone()
        y = F.batch_norm(x, mean, torch.ones_like(mean), training=True)
        self.mean.copy_(mean)
        return y


@pytest.mark.filterwarnings("ignore:.*is kept whole")
@pytest.mark.parametrize("kind", [Elsewhere, lambda: Whole(Averaging(6))])
def test_refuses_statistics_inside_of_what_is_kept_whole(kind: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(6, 6), kind(), nn.Linear(6, 6)).double()
    pipe = fxpipe.compile(model, ["cpu", "cpu"], 4, deferred_batch_norm=True)
    with pytest.raises(RuntimeError, match="deferred_batch_norm"):
        pipe(batch())

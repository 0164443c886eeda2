"""What ranks do in test_one_home.py: each tensor of a model is on one rank, whoever calls the pipe or the model."""

from __future__ import annotations

import copy
import io
import math
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxpipe
from fxpipe import FxpipeError, RankError, ReleasedError
from tests.whole.ranks.cases import Chain

SOON = 20  # seconds


def spread(group: Any, model: nn.Module, **options: Any) -> tuple[Any, nn.Module, tuple[Tensor, Tensor]]:
    """A pipe of the model after a step and an update, and the plain model after the same."""
    warnings.simplefilter("ignore")
    plain = copy.deepcopy(model)
    x, y = torch.randn(2, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    count = dist.get_world_size(group)
    pipe = fxpipe.compile(model, count, 4, schedule="1f1b", group=group, timeout=60, example_inputs=x, **options)
    for run in (pipe, plain):
        optimizer = torch.optim.SGD(run.parameters(), 0.1)
        loss = pipe.step(x, target=y, loss_fn=F.mse_loss) if run is pipe else F.mse_loss(run(x), y)
        if run is plain:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return pipe, plain, (x, y)


def chain(group: Any) -> nn.Module:
    torch.manual_seed(0)
    return Chain(dist.get_world_size(group)).double()


def nobody_sees_a_stale_tensor(group: Any) -> None:
    """What needs values of other ranks says so by name; what needs none is as before."""
    pipe, plain, (x, y) = spread(group, model := chain(group))
    other = f"layers.{1 - dist.get_rank(group)}.weight"
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for use in (
        lambda: model(x),
        lambda: model.state_dict(),
        lambda: torch.save(model, io.BytesIO()),
        lambda: Chain(2).double().load_state_dict(model.state_dict()),
        lambda: [p.detach().norm() for p in model.parameters()],
        lambda: nn.init.zeros_(model.get_parameter(other)),
        lambda: nn.utils.parameters_to_vector(model.parameters()),
    ):
        with pytest.raises(ReleasedError, match=r"layers\.\d\.\w+ has no values in this process: it is on rank \d"):
            use()
    optimizer.step()  # there is no gradient
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.parameters())
    assert f"ReleasedParameter({other}" in repr(copy.deepcopy(model).get_parameter(other))
    for utility, how in (
        (nn.utils.clip_grad_norm_, (1.0,)), (nn.utils.get_total_norm, ()), (nn.utils.parameters_to_vector, ()),
    ):  # fmt: skip
        with pytest.raises(FxpipeError, match=utility.__name__.strip("_")):
            utility(pipe.parameters(), *how)
    with pytest.raises(FxpipeError, match="ranks would clip by different norms"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    pipe.step(x, target=y, loss_fn=F.mse_loss)
    made_before = list(pipe.parameters())
    for norm in (
        lambda: nn.utils.clip_grad_norm_(made_before, 1.0),
        lambda: nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0),
        lambda: nn.utils.get_total_norm([p.grad for p in made_before if p.grad is not None]),
        lambda: nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]),
    ):
        with pytest.raises(FxpipeError, match="sees the gradients of one rank alone"):
            norm()
    nn.utils.clip_grad_value_(pipe.parameters(), 1.0)  # each by itself
    pipe.close()


def gathered(group: Any) -> None:
    """The whole trained model on the ranks that ask, until the next call."""
    pipe, plain, (x, y) = spread(group, model := chain(group))
    rank = dist.get_rank(group)
    pipe.gather(to=0)
    if rank == 0:
        torch.testing.assert_close(model(x), plain(x), rtol=1e-9, atol=0)
        assert type(model.get_parameter("layers.1.weight")) is nn.Parameter
    else:
        with pytest.raises(ReleasedError):
            model(x)
    pipe.step(x, target=y, loss_fn=F.mse_loss)
    with pytest.raises(ReleasedError):
        model(x)
    with pytest.raises(FxpipeError, match="to names rank 7"):
        pipe.gather(to=7)
    pipe.gather(to=1)
    pipe.gather()
    pipe.gather()
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-9, atol=0)
    pipe.close()
    again = fxpipe.compile(model, 2, 2, group=group, timeout=60)  # whole, so that it may be cut in any way
    torch.testing.assert_close(again.forward_only(x), plain(x).detach(), rtol=1e-9, atol=0)
    again.close()
    third = fxpipe.compile(model, 2, 4, group=group, timeout=60)  # each tensor stays where it is
    torch.testing.assert_close(third.forward_only(x), plain(x).detach(), rtol=1e-9, atol=0)
    third.close()


def what_libraries_call(group: Any) -> None:
    """Averages of weights, casts, initialisers, freezing: as of the plain model."""
    pipe, plain, (x, y) = spread(group, chain(group))
    runs = pipe, plain
    averages = [AveragedModel(run, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for run in runs]
    optimizers = [torch.optim.SGD(run.parameters(), 0.1) for run in runs]
    for _ in range(3):
        pipe.step(x, target=y, loss_fn=F.mse_loss)
        F.mse_loss(plain(x), y).backward()
        for average, optimizer, run in zip(averages, optimizers, runs, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(run)
    with torch.no_grad():
        torch.testing.assert_close(averages[0](x), averages[1](x), rtol=1e-9, atol=0)
    assert not torch.allclose(averages[1](x), plain(x))
    for run in runs:
        torch.manual_seed(3)
        run.apply(lambda module: nn.init.normal_(module.weight) if isinstance(module, nn.Linear) else None)
    same(pipe, plain)
    for run in runs:
        run.to(torch.float32)
    torch.testing.assert_close(pipe.forward_only(x.float()), plain(x.float()).detach())
    for run in runs:
        run.double().requires_grad_(False)
        run.get_parameter("layers.0.bias").requires_grad_()
    alone = torch.optim.SGD(pipe.parameters(), 0.1)  # the last rank has nothing to train
    pipe.step(x, target=y, loss_fn=F.mse_loss)
    F.mse_loss(plain(x), y).backward()
    alone.step()
    torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], 0.1).step()
    same(pipe, plain)
    assert fxpipe.clip_grad_norm_(pipe, math.inf).isfinite()
    pipe.close()


class Methods(Chain):
    """A model with methods of its own."""

    dtype = torch.float64

    def evaluate(self, x: Tensor) -> Tensor:
        return self(x).square().mean()

    def half_of_it(self, x: Tensor) -> Tensor:
        return self.layers[0](x)

    def renamed(self) -> Methods:
        return self

    def half(self) -> Methods:
        self.dtype = torch.float16
        return super().half()

    @property
    def largest(self) -> float:
        return max(p.abs().max().item() for p in self.parameters())


def the_models_own_methods(group: Any) -> None:
    """A call of the model in them is a call of the pipe; what needs tensors of other ranks is refused by name."""
    torch.manual_seed(0)
    pipe, plain, (x, _) = spread(group, Methods(2).double())
    with pytest.raises(FxpipeError, match=r"evaluate of Methods: autograd does not reach .* call pipe.step"):
        pipe.evaluate(x)
    with torch.no_grad():
        torch.testing.assert_close(pipe.evaluate(x), plain.evaluate(x), rtol=1e-9, atol=0)
    first_here = dist.get_rank(group) == 0
    if first_here:
        torch.testing.assert_close(pipe.half_of_it(x), plain.half_of_it(x), rtol=1e-9, atol=0)
    else:
        with pytest.raises(ReleasedError, match=r"half_of_it of Methods: layers.0.weight .* half_of_it then runs"):
            pipe.half_of_it(x)
    with pytest.raises(ReleasedError, match="largest of Methods"):
        _ = pipe.largest
    assert pipe.renamed() is pipe
    pipe.requires_grad_(False)
    assert not any(p.requires_grad for p in pipe.model.parameters())
    pipe.requires_grad_()
    pipe.gather()
    assert pipe.largest == pytest.approx(plain.largest, rel=1e-9)
    torch.testing.assert_close(pipe.evaluate(x), plain.evaluate(x), rtol=1e-9, atol=0)  # of the whole model, here
    for run in (pipe, plain):
        run.layers.append(nn.Linear(6, 6, dtype=torch.float64))
        with torch.no_grad():
            for p in run.layers[-1].parameters():
                p.copy_(torch.linspace(-1, 1, p.numel()).reshape(p.shape))
    torch.testing.assert_close(pipe.forward_only(x), plain(x).detach(), rtol=1e-9, atol=0)
    assert ("layers.2.weight" in pipe.state_dict()) != first_here  # with the stage that uses it
    assert pipe.half() is pipe
    assert pipe.dtype is torch.float16
    pipe.close()


def same(pipe: Any, plain: nn.Module) -> None:
    wanted = plain.state_dict()
    for key, value in pipe.state_dict().items():
        torch.testing.assert_close(value, wanted[key], rtol=1e-9, atol=1e-12, msg=key)


def one_leaves(group: Any, who: int, closes: str) -> list[str]:
    """A rank's own loop raises between two calls, in every second pipe: the others' next call says so, soon, and the
    next pipe in the same processes works."""
    rank, said = dist.get_rank(group), []
    for turn in range(4):
        model, x = chain(group), torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(turn))
        pipe, began = fxpipe.compile(model, dist.get_world_size(group), 4, group=group, timeout=59), time.monotonic()
        try:
            for step in range(3):
                pipe.step(x, target=x, loss_fn=F.mse_loss)
                if turn % 2 == 0 and step == 1 and rank == who:
                    raise ValueError("no more data")
            said.append("all went well")
        except (ValueError, RankError) as error:
            said.append(f"{type(error).__name__}: {error}")
            if closes == "at once":
                pipe.close()
        if closes == "later":
            pipe.close()
        del pipe  # or it is dropped
        assert time.monotonic() - began < SOON
    return said

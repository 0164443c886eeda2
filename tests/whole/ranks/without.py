"""What ranks do in tests/torch_internals: steps where torch does not have one of its private parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.errors import FxpipeError
from fxpipe.torch_internals.capability import capabilities
from tests.helpers.rendezvous_group import LAZY

from .rendezvous import like_nccl

X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.zeros(8, 6)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def over_gloo(group: Any, each: Sequence[str]) -> list[str]:
    return [attempt(group, what, number) for number, what in enumerate(each)]


def like_an_accelerator(group: Any, each: Sequence[str]) -> list[str]:
    fast = like_nccl(group, LAZY)
    return [attempt(fast, what, number) for number, what in enumerate(each)]


def attempt(group: Any, what: str, number: int) -> str:
    """Whether steps without this capability are right or refused by its name."""
    [capability] = [one for one in capabilities() if one.what == what]
    vars(capability)["there"] = False
    try:
        for replicas, schedule in ((None, "1f1b"), ((2,), "gpipe")):
            # a timeout of its own, so that the ranks make new groups
            step(group, replicas, schedule, timeout=60 + number / 8)
    except FxpipeError as error:
        return f"refused: {what}" if what in str(error) else str(error)
    finally:
        vars(capability)["there"] = True
    return "right"


def step(group: Any, replicas: tuple[int, ...] | None, schedule: str, timeout: float) -> None:
    plain, own = model(), model()
    wanted = F.mse_loss(plain(X), Y)
    wanted.backward()
    pipe = fxpipe.compile(own, 2, 2, group=group, timeout=timeout, replicas=replicas, schedule=schedule)
    try:
        torch.testing.assert_close(pipe.step(X, target=Y, loss_fn=F.mse_loss), wanted.detach())
        parameters, others = dict(own.named_parameters()), dict(plain.named_parameters())
        for name in pipe.keys_here():
            torch.testing.assert_close(parameters[name].grad, others[name].grad)
        if replicas:
            assert dist.get_world_size(pipe.replica_group) == 2
    finally:
        pipe.close()

"""What ranks do in test_rendezvous.py: steps over a process group with NCCL's rules."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch.distributed as dist

import fxpipe
from fxpipe.pipe.ranks.rank_pipe import RankPipe
from tests.helpers.models import MODELS
from tests.helpers.rendezvous_group import register
from tests.helpers.transparency import build, inputs
from tests.whole.ranks.cases import compare, step_over
from tests.whole.test_steps import reference, stepped

CHUNKS = 4


@cache
def like_nccl(group: Any, mode: str) -> Any:
    """A group of the same ranks with NCCL's rules."""
    register()
    return dist.new_group(dist.get_process_group_ranks(group), backend=mode, use_local_synchronization=True)


def is_the_model(
    group: Any, mode: str, name: str, schedule: str, checkpoint: str, replicas: Sequence[int] | None = None
) -> None:
    """Steps of a few batch sizes are the model's."""
    case = stepped(MODELS[name])
    model, twin = build(case), build(case)
    fast = like_nccl(group, mode)
    pipe = fxpipe.compile(
        twin, dist.get_world_size(group), CHUNKS, schedule=schedule, checkpoint=checkpoint, replicas=replicas,
        group=fast, timeout=20, **case.options,
    )  # fmt: skip
    assert isinstance(pipe, RankPipe)
    try:
        for batch in (8, 7, 2):

            def step(args: Any, kwargs: Any) -> Any:
                return pipe.step(*args, loss_fn=case.loss, outputs=True, **kwargs)

            got = step_over(group, twin, pipe.own_tensors, inputs(case, batch), batch, step)
            compare(group, got, lambda batch=batch: reference(case, model, batch, CHUNKS), case.tol)
    finally:
        pipe.close()

"""What ranks do in test_long.py: steps, steps and steps, of which nothing is left."""

from __future__ import annotations

import gc
import tempfile
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fxpipe
from tests.whole.test_leaks import BYTES, allocated, grown, held


def many_steps(group: Any, before: int, steps: int) -> None:
    """So many of several sizes, most of them small, after some in which all comes to be that is kept."""
    torch.manual_seed(0)
    layers = [layer for _ in range(dist.get_world_size(group)) for layer in (nn.Linear(4, 4), nn.Dropout(0.1))]
    pipe = fxpipe.compile(nn.Sequential(*layers), chunks=2, schedule="1f1b", group=group, timeout=60)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)
    batches = cycle([(torch.ones(rows, 4), torch.zeros(rows, 4)) for rows in (1, 1, 1, 1, 1, 1, 1, 4, 3)])

    def take(count: int) -> None:
        for x, y in islice(batches, count):
            optimizer.zero_grad()
            pipe.step(x, target=y, loss_fn=F.mse_loss)
            optimizer.step()

    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder  # where no other process makes any
        take(before)
        kept, objects, memory = held(), len(gc.get_objects()), allocated()
        take(steps)
        more = grown(kept)
        assert more == {}, more
        assert len(gc.get_objects()) - objects < 20
        assert allocated() - memory < BYTES
        tempfile.tempdir = None
    pipe.close()

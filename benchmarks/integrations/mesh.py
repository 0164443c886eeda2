"""A language model over a mesh of ranks: a pipeline in each row, and data or tensor parallelism between the rows.

torchrun --nproc-per-node 4 -m benchmarks.integrations.mesh ddp
torchrun --nproc-per-node 4 -m benchmarks.integrations.mesh fsdp
torchrun --nproc-per-node 4 -m benchmarks.integrations.mesh tp
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fxpipe
from benchmarks.integrations.script import show
from fxpipe.demo.transformer import Layer, PixelTransformer


def ddp(part: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(part, device_mesh=mesh)


def fsdp(part: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for module in part.modules():
        if isinstance(module, Layer):
            fully_shard(module, mesh=mesh)
    return fully_shard(part, mesh=mesh)


def tp(part: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(part, mesh, {"layers.*.grow": ColwiseParallel(), "layers.*.shrink": RowwiseParallel()})


def surprise(scores: Tensor, pixels: Tensor) -> Tensor:
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), pixels[:, 1:].flatten())


def batch(step: int) -> Tensor:
    """Counting, from anywhere."""
    starts = torch.randint(17, (16, 1), generator=torch.Generator().manual_seed(step))
    return (starts + torch.arange(12)) % 17


def losses(kind: str, steps: int = 5) -> list[float]:
    """Of the whole batch, by data or tensor parallelism ("ddp", "fsdp", "tp"), or by the plain model ("none")."""
    torch.manual_seed(0)
    model = PixelTransformer(length=16, width=32, depth=2)
    if kind == "none":
        return train_plain(model, steps)
    others = "tp" if kind == "tp" else "dp"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(others, "pp"))
    pipe = fxpipe.compile(model, chunks=4, schedule="1f1b", group=mesh["pp"], example_inputs=batch(0))
    pipe.parallelize(mesh[others], {"ddp": ddp, "fsdp": fsdp, "tp": tp}[kind])
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    found = []
    for step in range(steps):
        pixels = batch(step)
        if others == "dp":  # each row has its own part of the batch
            pixels = pixels.chunk(2)[mesh.get_local_rank("dp")]
        loss = pipe.step(pixels, target=pixels, loss_fn=surprise)
        fxpipe.clip_grad_norm_(pipe, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss, group=mesh.get_group(others))
        found.append(loss.item() / 2)
    pipe.close()
    return found


def train_plain(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(steps):
        loss = surprise(model(batch(step)), batch(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


if __name__ == "__main__":
    dist.init_process_group()
    kind = sys.argv[1]
    found = losses(kind)
    if dist.get_rank() == 0:
        show(kind, found)
    dist.destroy_process_group()

"""What ranks do in test_meshes.py: rows of a mesh that are pipes, and what is between them."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fxpipe
from benchmarks.integrations import mesh as integration
from fxpipe import RankError
from fxpipe.runtime.dtensor_stage import Parts
from tests.helpers.rendezvous_group import register
from tests.whole.ranks.backends import DEVICES, device_of
from tests.whole.ranks.cases import Boom, Chain, at, raises, throw, whole

ROWS, CHUNKS, WORDS = 8, 4, 12


class Block(nn.Module):
    """Attention with two heads, if it is wanted, and an MLP."""

    def __init__(self, width: int, attends: bool) -> None:
        super().__init__()
        self.attends = attends
        self.norm = nn.LayerNorm(width)
        if attends:
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.attends:
            x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(self.norm(x))))

    def attention(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(x).view(n, t, 2, 3 * width // 2).transpose(1, 2).chunk(3, -1)
        later = torch.ones(t, t, dtype=torch.bool).triu(1)
        found = (q @ k.transpose(-1, -2) / width).masked_fill(later, -torch.inf).softmax(-1) @ v
        return self.out(found.transpose(1, 2).reshape(n, t, width))


class Words(nn.Module):
    """A language model; the scale of what it says, used at both ends, is a parameter that stages share."""

    def __init__(self, depth: int, attends: bool, width: int = 8) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width, attends) for _ in range(depth))
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale).transpose(1, 2)


PLAN = {
    "embed": RowwiseParallel(), "head": ColwiseParallel(),
    **{f"blocks.*.{name}": ColwiseParallel() for name in ("qkv", "up")},
    **{f"blocks.*.{name}": RowwiseParallel() for name in ("out", "down")},
}  # fmt: skip


def data(step: int) -> Tensor:
    return torch.randint(WORDS, (ROWS, 5), generator=torch.Generator().manual_seed(step))


def ddp(part: nn.Module, mesh: Any) -> nn.Module:
    return DistributedDataParallel(part, device_mesh=mesh, bucket_cap_mb=0.001)


def fsdp(part: nn.Module, mesh: Any) -> nn.Module:
    return fully_shard(part, mesh=mesh)


def fsdp_by_blocks(part: nn.Module, mesh: Any) -> nn.Module:
    for module in part.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    return fully_shard(part, mesh=mesh)


def tensor_parallel(part: nn.Module, mesh: Any) -> nn.Module:
    return parallelize_module(part, mesh, PLAN)


KINDS = {"ddp": ddp, "fsdp": fsdp, "fsdp by blocks": fsdp_by_blocks, "tp": tensor_parallel}


def rows_of(*names: str, mode: str | None = None) -> Any:
    """A mesh of the four ranks, over gloo, or in another mode (`backends.py`)."""
    shape = (2, 2) if len(names) == 2 else tuple(1 if name == "pp" else 2 for name in names)
    if not mode or mode in DEVICES:
        return init_device_mesh(device_of(mode), shape, mesh_dim_names=names)
    register()
    return init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override=dict.fromkeys(names, mode))


def piped(mesh: Any, kinds: str, schedule: str, attends: bool = False) -> tuple[fxpipe.Pipe, nn.Module]:
    """A pipe along one row of the mesh, and the plain model."""
    torch.manual_seed(1)
    depth = 4 if schedule in ("interleaved", "interleaved-late", "looped-bfs") else 2
    model, plain = Words(depth, attends).double(), Words(depth, attends).double()
    plain.load_state_dict(model.state_dict())
    pipe = fxpipe.compile(model, chunks=CHUNKS, schedule=schedule, group=mesh["pp"], timeout=60, example_inputs=data(0))
    for name, kind in zip([n for n in ("tp", "dp") if n in mesh.mesh_dim_names], kinds.split(", "), strict=True):
        pipe.parallelize(mesh[name], KINDS[kind])
    return pipe, plain


def slice_of(mesh: Any, ids: Tensor) -> Tensor:
    """This row's part of the batch."""
    names = mesh.mesh_dim_names
    if "dp" not in names:
        return ids
    return ids.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")]


def steps_are_the_models(
    group: Any, names: str, kinds: str, schedule: str, attends: bool, mode: str | None = None
) -> None:
    """Some steps of training, with accumulation, a scaler and clipping, beside the plain model on the whole batch."""
    mesh = rows_of(*names.split(), mode=mode)
    pipe, plain = piped(mesh, kinds, schedule, attends)
    keys = {name for name, _ in pipe.named_parameters()}
    if "fsdp" in kinds:
        assert all(isinstance(p, DTensor) for p in pipe.parameters())
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (pipe, plain)]
    scaler, plain_scaler = fxpipe.GradScaler(pipe, "cpu", init_scale=256.0), torch.amp.GradScaler("cpu", 256.0)
    for turn in range(2):
        for part in range(2):
            ids = data(10 * turn + part)
            mine = slice_of(mesh, ids)
            loss = pipe.step(mine, target=mine, loss_fn=F.cross_entropy, scaler=scaler)
            with torch.no_grad():
                torch.testing.assert_close(loss, F.cross_entropy(plain(mine), mine), rtol=1e-9, atol=0)
            plain_scaler.scale(F.cross_entropy(plain(ids), ids)).backward()
        wanted = dict(plain.named_parameters())
        for name, p in pipe.named_parameters():
            assert p.grad is not None, name
            assert not isinstance(p, DTensor) or p.grad.placements == p.placements
            if turn == 0:
                torch.testing.assert_close(whole(p.grad), wanted[name].grad, rtol=1e-9, atol=1e-9)
        if turn == 0:  # an infinity on one rank alone
            odd = next(pipe.parameters())
            if dist.get_rank() == 1:
                (odd.grad.to_local() if isinstance(odd.grad, DTensor) else odd.grad).view(-1)[0] = torch.inf
            next(plain.parameters()).grad.view(-1)[0] = torch.inf
        scaler.unscale_(optimizers[0])
        plain_scaler.unscale_(optimizers[1])
        norm = fxpipe.clip_grad_norm_(pipe, 0.1)
        assert not isinstance(norm, DTensor)
        plain_norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        if turn != 0:
            torch.testing.assert_close(norm, plain_norm, rtol=1e-9, atol=0)
        for optimizer, its in zip(optimizers, (scaler, plain_scaler), strict=True):
            its.step(optimizer)
            its.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == plain_scaler.get_scale()
    for name, p in pipe.named_parameters():
        torch.testing.assert_close(whole(p.detach()), plain.get_parameter(name).detach(), rtol=1e-7, atol=1e-9)
    pipe.eval()
    with torch.no_grad():
        torch.testing.assert_close(pipe.forward_only(data(7)), plain(data(7)), rtol=1e-9, atol=1e-9)
    assert set(pipe.state_dict()) == keys
    pipe.load_state_dict(plain.state_dict())
    for name, p in pipe.named_parameters():
        assert torch.equal(whole(p.detach()), plain.get_parameter(name).detach()), name
    pipe.close()


def schedules_are_the_model(group: Any, names: str, kind: str, schedules: Sequence[str], mode: str) -> None:
    """A step under each schedule, beside the plain model on the whole batch."""
    mesh, ids = rows_of(*names.split(), mode=mode), data(3)
    mine = slice_of(mesh, ids)
    for schedule in schedules:
        pipe, plain = piped(mesh, kind, schedule)
        F.cross_entropy(plain(ids), ids).backward()
        try:
            loss = pipe.step(mine, target=mine, loss_fn=F.cross_entropy)
            with torch.no_grad():
                torch.testing.assert_close(loss.cpu(), F.cross_entropy(plain(mine), mine), rtol=1e-9, atol=0)
            for name, p in pipe.named_parameters():
                assert p.grad is not None, name
                torch.testing.assert_close(whole(p.grad), plain.get_parameter(name).grad, rtol=1e-9, atol=1e-9)
        except BaseException as error:
            error.add_note(f"{schedule}, {kind}, {mode}")
            raise
        pipe.close()


# Faults ---------------------------------------------------------------------------------------------------------------


def chained(mesh: Any, kind: str) -> tuple[Any, Tensor, Any]:
    """A pipe of two layers with a bomb each, this row's half of a batch, and what to do with it."""
    torch.manual_seed(0)
    model, x = Chain(2).double(), torch.randn(8, 6, dtype=torch.float64)
    pipe = fxpipe.compile(
        model, chunks=4, schedule="1f1b", cut=["layers.1"], group=mesh["pp"], timeout=60, example_inputs=x
    )
    pipe.parallelize(mesh["dp"], KINDS[kind])
    mine = slice_of(mesh, x)
    return pipe, mine, lambda: pipe.step(mine, target=mine, loss_fn=F.mse_loss)


def fail_in_one_row(group: Any, kind: str, mode: str | None) -> None:
    """Every rank of both rows has an error, and no gradient; the next step is right, also after errors at the door."""
    mesh = rows_of("dp", "pp", mode=mode)
    pipe, mine, step = chained(mesh, kind)
    step()
    wanted = [whole(p.grad).clone() for p in pipe.parameters()]
    row, rank = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    for action in ("1F1", "0B2"):
        pipe.zero_grad()
        if row == 1:
            at(pipe, action, throw)
        with pytest.raises(Boom if (row, rank) == (1, int(action[0])) else RankError) as caught:
            step()
        if row == 0:
            assert "pipe 1: " in str(caught.value)
            assert f"Boom: boom\nstage {action[0]}" in str(caught.value)
        assert all(p.grad is None for p in pipe.parameters())
    with raises("loss_fn is 3" if row else "pipe 1: "):
        pipe.step(mine, target=mine, loss_fn=3 if row else F.mse_loss)
    step()
    for p, grad in zip(pipe.parameters(), wanted, strict=True):
        torch.testing.assert_close(whole(p.grad), grad, rtol=1e-12, atol=0)
    pipe.close()


def lose(group: Any, kind: str, mode: str | None) -> None:
    """A rank of the second row is killed in the middle of a step."""
    mesh = rows_of("dp", "pp", mode=mode)
    pipe, _, step = chained(mesh, kind)
    step()
    if dist.get_rank() == 3:
        at(pipe, "1F2", lambda: os.kill(os.getpid(), signal.SIGKILL))
    step()


def refused(group: Any) -> None:
    """What cannot be right says why."""
    rank = dist.get_rank()
    dp, tp = rows_of("dp", "pp"), rows_of("pp", "tp")
    x = torch.randn(8, 6)

    def compiled(mesh: Any, model: nn.Module, **options: Any) -> Any:
        return fxpipe.compile(model, chunks=2, group=mesh["pp"], timeout=60, **options)

    with raises("it is not decided yet which rank has which stage"):
        compiled(dp, Chain(2)).parallelize(dp["dp"], ddp)
    pipe = compiled(dp, Chain(2), example_inputs=x)
    with raises("name one dimension of a DeviceMesh"):
        pipe.parallelize(dp, ddp)
    with raises("nothing was made of the part: return DistributedDataParallel"):
        pipe.parallelize(dp["dp"], lambda part, mesh: part)
    with raises("what was made of the part is a Linear"):
        pipe.parallelize(dp["dp"], lambda part, mesh: nn.Linear(2, 2))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with raises("is gathered as torch.bfloat16, and the stages are made for torch.float32"):
        pipe.parallelize(dp["dp"], lambda part, mesh: fully_shard(part, mesh=mesh, mp_policy=half))
    pipe = compiled(dp, Chain(3), example_inputs=x, cut=[1, 2] if rank < 2 else [2, 1])
    with raises("ranks 0 and 1 do not have the same model and plan", "layers.1.weight"):
        pipe.parallelize(dp["dp"], ddp)
    pipe = compiled(dp, Chain(2), example_inputs=x)
    pipe.parallelize(dp["dp"], ddp)
    with raises("make the loss function a part of the model"):
        pipe.step(x, target=x, loss_fn=Weighted())
    with raises("parallel over its data already"):
        pipe.parallelize(dp["dp"], ddp)
    with raises("stages have replicas, which copy each other's whole tensors"):
        compiled(dp, Chain(2), example_inputs=x, replicas=(2,)).parallelize(dp["dp"], fsdp)
    compiled(dp, Chain(2), example_inputs=x, replicas=(2,)).parallelize(dp["dp"], ddp)
    noisy = nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.Linear(6, 6))
    pipe = compiled(tp, noisy, example_inputs=x)
    with raises("the model draws random numbers"):
        pipe.parallelize(tp["tp"], lambda part, mesh: parallelize_module(part, mesh, {"*": ColwiseParallel()}))
    together = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    together[1].weight = together[2].weight
    pipe = compiled(tp, together, example_inputs=x, cut=["1"])
    part = pipe.parallelize(tp["tp"], lambda part, mesh: parallelize_module(part, mesh, {"2": ColwiseParallel()}))
    if rank >= 2:
        assert part.get_parameter("1.weight") is part.get_parameter("2.weight")
        assert part.get_parameter("1.weight").to_local().shape == (3, 6)


class Weighted(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        return self.weight * F.mse_loss(y, target)


# Checkpoints ----------------------------------------------------------------------------------------------------------


def losses_of(pipe: Any, mesh: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Those of the whole batch."""
    found = []
    for step in steps:
        mine = slice_of(mesh, data(step))
        loss = pipe.step(mine, target=mine, loss_fn=F.cross_entropy)
        dist.all_reduce(loss)
        found.append(loss.item() / dist.get_world_size())
        optimizer.step()
        optimizer.zero_grad()
    return found


def saved(group: Any, folder: Path) -> list[float]:
    """Trains with FSDP2, saves, and goes on in three ways: here, with tensor parallelism, and in the plain model."""
    mesh = rows_of("dp", "pp")
    pipe, plain = piped(mesh, "fsdp by blocks", "1f1b")
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
    losses_of(pipe, mesh, optimizer, range(2))
    fxpipe.save_checkpoint(folder, pipe, optimizer, step=2)
    wanted = losses_of(pipe, mesh, optimizer, range(2, 5))
    pipe.close()
    other = rows_of("pp", "tp")
    pipe, _ = piped(other, "tp", "gpipe")
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
    assert fxpipe.load_checkpoint(folder, pipe, optimizer) == {"step": 2}
    torch.testing.assert_close(losses_of(pipe, other, optimizer, range(2, 5)), wanted, rtol=1e-9, atol=0)
    pipe.close()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    fxpipe.load_checkpoint(folder, plain, optimizer)
    found = []
    for step in range(2, 5):
        loss = F.cross_entropy(plain(data(step)), data(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0)
    return wanted


def script(group: Any) -> None:
    """The losses of the script are those of the plain model."""
    wanted = integration.losses("none", 2)
    for kind in ("ddp", "tp"):
        torch.testing.assert_close(integration.losses(kind, 2), wanted, rtol=1e-4, atol=0)


# Functions of users ---------------------------------------------------------------------------------------------------


def without_bias(group: Any) -> None:
    """Tensor parallelism of layers without bias, of which each rank of a pipe has some; before, a function that fails
    on the second ranks of the rows: all ranks hear of it at once."""
    mesh = rows_of("tp", "pp")
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4))).double(), torch.randn(4, 8).double()
    F.mse_loss(model(x), x).backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    pipe = fxpipe.compile(model, chunks=2, schedule="gpipe", group=mesh["pp"], timeout=30, example_inputs=x)
    plan, own = {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": ColwiseParallel(), "3": RowwiseParallel()}, mesh
    fails = own.get_local_rank("pp") == 1

    def mistaken(part: nn.Module, _: Any) -> nn.Module:
        if fails:
            raise KeyError("a mistake")
        return part

    began = time.monotonic()
    with pytest.raises(KeyError if fails else RankError, match="a mistake"):
        pipe.parallelize(mesh["tp"], mistaken)
    assert time.monotonic() - began < 10
    pipe.parallelize(mesh["tp"], lambda part, tp: parallelize_module(part, tp, plan))
    pipe.step(x, target=x, loss_fn=F.mse_loss)
    for name, p in pipe.named_parameters():
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(grad, wanted[name], rtol=1e-9, atol=0)
    pipe.close()


# What stages compute of parts -----------------------------------------------------------------------------------------


def reduced(x: Any, t: Any) -> dict[str, Any]:
    """Functions that make one result of all numbers, or of all in a dimension."""
    return {
        "mse": F.mse_loss(x, t),
        "smooth": F.smooth_l1_loss(x, t),
        "huber": F.huber_loss(x, t),
        "soft margin": F.soft_margin_loss(x, t.sign()),
        "l1": F.l1_loss(x, t),
        "entropy": F.binary_cross_entropy(x.sigmoid(), t.sigmoid()),
        "logits": F.binary_cross_entropy_with_logits(x, t.sigmoid()),
        "divergence": F.kl_div(x, t.sigmoid()),
        "classes": F.cross_entropy(x, t.argmax(1)),
        "norm": x.norm(),
        "norms": x.norm(dim=1).sum() + x.norm(dim=0).sum(),
        "largest": x.amax(1).sum() + x.amax(0).sum(),
        "variance": x.var(),
        "mean": x.mean(),
        "means": (x.mean(0) * t.mean(0)).sum() + (x.mean(1) * t.mean(1)).sum(),
        "softmax": (x.softmax(1) * t).sum() + (x.softmax(0) * t).sum(),
        "product": (x @ t.T).square().sum(),
    }


def tied_and_cut(group: Any) -> None:
    """A weight that is cut by rows, and that a stage on another rank uses too."""
    mesh, x = rows_of("pp", "tp"), torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    model[2].weight = model[0].weight
    plain = copy.deepcopy(model)
    loss = F.mse_loss(plain(x), x)
    loss.backward()
    pipe = fxpipe.compile(model, 2, 2, group=mesh["pp"], timeout=60, example_inputs=x, cut=["2"])
    pipe.parallelize(mesh["tp"], lambda part, row: parallelize_module(part, row, {"0": ColwiseParallel()}))
    torch.testing.assert_close(pipe.step(x, target=x, loss_fn=F.mse_loss), loss.detach())
    for name, parameter in pipe.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(whole(parameter.grad), plain.get_parameter(name).grad, msg=name)
    assert dist.get_rank() >= 2 or isinstance(dict(pipe.named_parameters())["0.weight"], DTensor)
    pipe.close()


def reductions(group: Any) -> None:
    """What makes one result of parts has the loss and the gradients of the whole."""
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    x, t = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    for name in reduced(x, t):
        for dim in range(2):
            plain = x.clone().requires_grad_()
            wanted = reduced(plain, t)[name]
            wanted.backward()
            part = distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_()
            parts = Parts(mesh)
            with parts:
                found = parts.plain(reduced(part, t)[name])
            found.backward()
            torch.testing.assert_close(found, wanted, msg=f"{name}, cut on {dim}")
            assert part.grad is not None
            torch.testing.assert_close(whole(part.grad), plain.grad, msg=f"{name}, cut on {dim}")

"""Random models with several programs over the same tensors, called in a random order over ranks, beside the plain one.

What is captured is shared by some cases in turn, which have one model, as it takes longer than all else.

A model has units with tensors, and programs that run some of them in some order: all, in reverse, a part, some of them
twice, and products of the weights of units that are far apart. So the kinds of calls use the tensors in different
places. The plain model runs the micro-batches one after the other, so that what forward writes is comparable.

    python -m tests.whole.ranks.several_kinds --cases 1000 --ranks 2
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch, which reads it once

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fxpipe
from fxpipe.runtime.microbatch import split_sizes
from tests.helpers.transparency import on_cpu
from tests.whole.ranks.backends import device_here
from tests.whole.ranks.cases import whole
from tests.whole.ranks.pool import Pool, RankFailed
from tests.whole.test_tensor_parallel import fast

WIDTH, SAMPLES = 4, (1, 2, 3, 4, 5, 7, 8)
ALIKE = 8  # cases in turn with one model
FRESH = 64  # cases in turn with the same processes, in which torch.compile leaves more and more behind
SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
DEALT = ("interleaved", "looped-bfs", "zb-v", "dualpipe-v")  # two stages on each rank, none with replicas
CHECKPOINTS = ("never", "except_last", "always")


class Scaled(nn.Module):
    """A parameter, and a buffer that counts the calls and is used."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x * self.scale * (1 + 0.01 * self.calls)


class Averaged(nn.Module):
    """A running mean of what it saw, which is subtracted."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.fc(x) - self.mean


class Attends(nn.Module):
    """A layer of nn.TransformerEncoder: one op in evaluation, many in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, 0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, None]).squeeze(1)


UNITS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "scaled": Scaled,
    "averaged": Averaged,
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "attends": Attends,
}
WRITES = ("scaled", "averaged", "batch norm")
MESHES = ("ddp", "fsdp", "dtensors")
Program = tuple[tuple[str, tuple[int, ...]], ...]  # ("unit", one) or ("product", two linear units)


class Net(nn.Module):
    """Units, and programs over them; `how` chooses one."""

    def __init__(self, units: Sequence[str], programs: Sequence[Program], tied: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.units = nn.ModuleList(UNITS[kind]() for kind in units)
        for a, b in tied:
            self.units[b].weight = self.units[a].weight
        self.programs = programs

    def forward(self, x: Tensor, how: int = 0) -> Tensor:
        for what, at in self.programs[how]:
            if what == "unit":
                x = torch.tanh(self.units[at[0]](x))
            else:
                x = x + x @ (self.units[at[0]].weight @ self.units[at[1]].weight)
        return x


@dataclass(frozen=True)
class Case:
    """A model, the options of its pipe, and what is done in turn: each (what, program, samples)."""

    seed: int
    units: tuple[str, ...]
    programs: tuple[Program, ...]
    tied: tuple[tuple[int, int], ...]
    options: dict[str, Any]
    form: str
    turns: tuple[tuple[str, int, int], ...]


def forms(ranks: int) -> list[str]:
    """Of parallelism beside the pipeline: those for so many ranks."""
    return ["replicas", "zero3", *(["tensor parallel"] if ranks % 2 == 0 else []), *(MESHES if ranks == 4 else [])]


def drawn(seed: int, ranks: int, form: str = "", alike: int = ALIKE) -> Case:
    """The case with this number. `form`: the only one, or ""."""
    rng = Random(f"{seed // alike} {ranks}")
    form = form or ("plain" if rng.random() < 0.6 else rng.choice(forms(ranks)))
    schedules = rng.sample(SCHEDULES, len(SCHEDULES)) if form == "plain" else ["gpipe", "1f1b"]
    schedule = schedules[seed % len(schedules)]
    kinds = ["linear", "linear", "norm", "scaled", "averaged", "batch norm", "attends"]
    if form != "plain":  # what a slice of the samples changes: statistics
        kinds = [kind for kind in kinds if kind not in WRITES]
    if form == "dtensors":  # which torch has no attention for, and no tied tensors that are cut in two ways
        kinds.remove("attends")
    stages = ranks * (2 if form == "plain" else 1)
    units = tuple(rng.choice(kinds) for _ in range(rng.randint(max(4, stages), max(7, stages + 2))))
    linear = [at for at, kind in enumerate(units) if kind == "linear"]
    tied = ((linear[0], linear[-1]),) if len(linear) > 2 and rng.random() < 0.3 and form != "dtensors" else ()
    programs = tuple(program(rng, how, len(units), linear) for how in range(2 + (rng.random() < 0.25)))
    options: dict[str, Any] = {"chunks": rng.randint(1, 4), "schedule": schedule}
    options["backward"] = rng.choice(["autograd", "autograd", "code"]) if form == "plain" else "autograd"
    rng = Random(f"{seed} of {ranks}")
    options["checkpoint"] = rng.choice(CHECKPOINTS)
    turns = []
    for _ in range(rng.randint(4, 7)):
        what = rng.choice(["step", "step", "step", "infer", "evaluate", "update", "freeze"])
        samples = rng.choice(SAMPLES)
        if form == "zero3":
            samples = rng.randint(ranks * options["chunks"], 16)
        elif form in ("tensor parallel", *MESHES):  # micro-batches, and the rows of a mesh, have one size
            samples *= 2 * options["chunks"]
        if form == "plain" and what == "step" and rng.random() < 0.3:
            what = "pairs"
        turns.append((what, rng.randrange(len(programs)), samples))
    first = 8 * options["chunks"] if form in ("tensor parallel", *MESHES) else 16
    return Case(seed, units, programs, tied, options, form, (("step", 0, first), *turns))


def program(rng: Random, how: int, count: int, linear: Sequence[int]) -> Program:
    """The first program runs all units in order."""
    order = list(range(count))
    if how:
        way = rng.choice(["reverse", "any", "part", "again"])
        order = {"reverse": order[::-1], "again": order + order[: count // 2]}.get(way, order)
        order = rng.sample(order, rng.randint(2, count)) if way == "part" else order
        rng.shuffle(order) if way == "any" else None
    found: list[tuple[str, tuple[int, ...]]] = [("unit", (at,)) for at in order]
    if len(linear) > 1 and rng.random() < 0.5:
        found.insert(rng.randint(0, len(found)), ("product", tuple(rng.sample(linear, 2))))
    return tuple(found)


# What a rank does -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Captured:
    """The model of the last case on this rank, and what captured its calls."""

    key: tuple[Any, ...]
    model: nn.Module
    captures: tuple[Any, Any]


last: list[Captured] = []


def run(group: Any, case: Case) -> list[str]:
    """Differences from the plain model on this rank, or "refused: ..."."""
    warnings.simplefilter("ignore")
    key = case.units, case.programs, case.tied, case.form, torch.distributed.get_world_size(group)
    known = last.pop() if last and last[-1].key == key and case.form in ("plain", "replicas") else None
    if known is None:
        last.clear()
        torch._dynamo.reset()  # forgets what was traced, which takes memory
        gc.collect()
    gc.freeze()  # a pipe collects garbage once a kind of call, and need not look at all that torch.compile has
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(case.seed)
    plain = Net(case.units, case.programs, case.tied)
    model = copy.deepcopy(plain) if known is None else begun(known.model, plain)
    pipe = None
    try:
        pipe = made(group, case, model)
        if known is not None:
            pipe._state.cache.call_capture, pipe._state.cache.step_capture = known.captures
        found = played(pipe, plain, case)
        if case.form in ("plain", "replicas"):
            pipe.gather()
            last.append(Captured(key, model, (pipe._state.cache.call_capture, pipe._state.cache.step_capture)))
        return found
    except fxpipe.FxpipeError as error:
        return [f"refused: {error}"]
    finally:
        gc.unfreeze()
        if pipe is not None:
            pipe.close()
        torch.set_default_dtype(torch.float32)


def begun(model: nn.Module, plain: nn.Module) -> nn.Module:
    """The model as it was at the start of a case, with the values of the plain one."""
    model.load_state_dict(plain.state_dict())
    model.train().requires_grad_(True)
    model.zero_grad()
    return model


def made(group: Any, case: Case, model: nn.Module) -> Any:
    size, options = torch.distributed.get_world_size(group), dict(case.options)
    x = torch.zeros(8, WIDTH)
    if case.form in ("replicas", "zero3"):
        options["replicas"] = (1, size - 1) if case.seed % 2 and size > 2 else (size // 2, size - size // 2)
        options["replicas"] = (2,) if size == 2 else options["replicas"]
    if case.form == "zero3":
        draft = fxpipe.compile(copy.deepcopy(model), size, group=group, timeout=60, example_inputs=x, **options)
        plan = replace(draft.build.plan, optimizer_sharding="zero3")
        draft.close()
        return fxpipe.compile(model, plan=plan, group=group, timeout=60, example_inputs=x)
    if case.form == "tensor parallel":
        found = fxpipe.plan(
            model, fast(size), 8 * options["chunks"], example_inputs=x, tensor_parallel=2, planner="straight",
            micro_batches=options["chunks"], recompute=options["checkpoint"] != "never",
        )  # fmt: skip
        found = replace(found, plan=replace(found.plan, optimizer_sharding="zero1"))  # each parameter has one owner
        return fxpipe.compile(model, plan=found, group=group, timeout=60)
    if case.form in MESHES:
        rows = mesh()
        pipe = fxpipe.compile(model, group=rows["pp"], timeout=60, example_inputs=x, **options)
        pipe.parallelize(rows["dp"], WAYS[case.form])
        return pipe
    return fxpipe.compile(model, size, group=group, timeout=60, **options)


@cache
def mesh() -> Any:
    """Two pipes of two ranks."""
    return init_device_mesh(device_here(), (2, 2), mesh_dim_names=("dp", "pp"))


def dtensors(part: nn.Module, group: Any) -> nn.Module:
    """Every other linear layer is cut by columns or by rows."""
    names = sorted(name for name, module in part.named_modules() if isinstance(module, nn.Linear))
    return parallelize_module(
        part, group, {name: (ColwiseParallel, RowwiseParallel)[at % 2]() for at, name in enumerate(names)}
    )


WAYS: dict[str, Callable[[nn.Module, Any], nn.Module]] = {
    "ddp": lambda part, group: DistributedDataParallel(part, device_mesh=group),
    "fsdp": lambda part, group: fully_shard(part, mesh=group),
    "dtensors": dtensors,
}


def played(pipe: Any, plain: nn.Module, case: Case) -> list[str]:
    chunks, generator = pipe.options.chunks, torch.Generator().manual_seed(case.seed)
    optimizers: list[Any] = []
    found: list[str] = []
    sliced = case.form in ("ddp", "fsdp")  # each row of the mesh has a half of the samples

    def mine(x: Tensor) -> Tensor:
        return x.chunk(2)[mesh().get_local_rank("dp")] if sliced else x

    for turn, (what, how, samples) in enumerate(case.turns):
        x, target = (torch.randn(samples, WIDTH, generator=generator) for _ in range(2))
        if any(
            at[0] in {k for k, kind in enumerate(case.units) if kind == "batch norm"} for _, at in case.programs[how]
        ):
            pieces = max(2 * chunks, samples)  # batch norm needs two samples of each micro-batch
            x, target = (torch.randn(pieces, WIDTH, generator=generator) for _ in range(2))
        where = f"turn {turn}, {what} {how} of {len(x)}"
        if what in ("step", "pairs"):
            loss_fn = of_pairs if what == "pairs" else F.mse_loss
            loss = pipe.step(mine(x), how, target=mine(target), loss_fn=loss_fn)
            if sliced:
                torch.distributed.all_reduce(loss)
                loss /= 4
            wanted = plain_step(plain, x, how, target, chunks, loss_fn)
            found += differing(where, {"loss": loss}, {"loss": wanted})
            found += differing(where, gradients(pipe), gradients(plain))
        elif what in ("infer", "evaluate"):
            pipe.train(what == "infer")
            plain.train(what == "infer")
            got = pipe.forward_only(mine(x), how)
            with torch.no_grad():
                pieces = x.split(split_sizes(len(x), chunks)) if what == "infer" else [x]
                wanted = torch.cat([plain(piece, how) for piece in pieces])
                found += differing(where, {"output": got}, {"output": mine(wanted)})
            pipe.train(), plain.train()
        elif what == "update":
            optimizers = optimizers or [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (pipe, plain)]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        elif what == "freeze":
            names = sorted(name for name, _ in plain.named_parameters())
            for model in (pipe, plain):
                for path, parameter in model.named_parameters():
                    if path == names[samples % len(names)]:
                        parameter.requires_grad_(not parameter.requires_grad)
                        parameter.grad = None
        found += differing(f"{where}: tensors", tensors(pipe.held_tensors()), tensors(state_of(plain)))
    return found


def of_pairs(output: Tensor, target: Tensor) -> Tensor:
    """A loss of all samples with each other, which micro-batches do not add up to."""
    return ((output @ output.t() - target @ target.t()).square().mean() + 0.01).sqrt()


def plain_step(plain: nn.Module, x: Tensor, how: int, target: Tensor, chunks: int, loss_fn: Any) -> Tensor:
    pieces = x.split(split_sizes(len(x), chunks))
    loss: Tensor = loss_fn(torch.cat([plain(piece, how) for piece in pieces]), target)
    if loss.requires_grad:
        loss.backward()
    return loss.detach()


def state_of(plain: nn.Module) -> dict[str, Tensor]:
    return {**dict(plain.named_parameters(remove_duplicate=False)), **dict(plain.named_buffers(remove_duplicate=False))}


def gradients(model: nn.Module) -> dict[str, Any]:
    return {name: None if p.grad is None else whole(p.grad) for name, p in model.named_parameters()}


def tensors(held: dict[str, Tensor]) -> dict[str, Tensor]:
    return {path: whole(tensor.detach()).clone() for path, tensor in held.items()}


def differing(where: str, got: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """What differs, of the names in both."""
    found = []
    for name in got.keys() & wanted.keys():
        mine, right = on_cpu((got[name], wanted[name]))
        if mine is None or right is None:
            odd = (mine is None) != (right is None) and bool((right if mine is None else mine).abs().max() > 0)
        else:
            odd = mine.shape != right.shape or not torch.allclose(mine, right, rtol=1e-8, atol=1e-10)
        if odd:
            off = "missing" if mine is None or right is None else f"off by {float((mine - right).abs().max()):.1e}"
            found.append(f"{where}: {name} {off}")
    return found


# The command ----------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.whole.ranks.several_kinds", description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--form", default="", help="the only one: plain, replicas, zero3, tensor parallel, ddp, ...")
    parser.add_argument("--alike", type=int, default=ALIKE, help="how many cases in turn have one model")
    parser.add_argument("--refused", action="store_true", help="print the cases that were refused")
    asked = parser.parse_args()
    counts, reasons, start = Counter[str](), Counter[str](), time.monotonic()
    pool = Pool(asked.ranks)
    for seed in range(asked.first, asked.first + asked.cases):
        case = drawn(seed, asked.ranks, asked.form, asked.alike)
        if seed % FRESH == 0 and counts:
            print(f"{sum(counts.values())} cases: {dict(counts)}, {time.monotonic() - start:.0f} s", flush=True)
            pool.close()
            pool = Pool(asked.ranks)
        try:
            found = pool.run(run, case, ranks=tuple(range(asked.ranks)))
            refused = [line for rank in found for line in rank if line.startswith("refused")]
            refused.sort(key=lambda line: "a rank has failed" in line)
            wrong = [
                f"rank {rank}: {line}" for rank, lines in enumerate(found) for line in lines if line not in refused
            ]
        except RankFailed as error:
            refused, wrong = [], [str(error)[-3000:]]
            pool.close()
            pool = Pool(asked.ranks)
        what = "wrong" if wrong else "refused" if refused else "right"
        counts[what] += 1
        reasons.update(line.splitlines()[0][:150] for line in refused[:1])
        if refused and asked.refused:
            print(f"case {seed}: {case}", refused[0], sep="\n  ", flush=True)
        if wrong:
            print(f"case {seed}: {case}", *wrong[:5], sep="\n  ", flush=True)
    pool.close()
    print(f"{asked.ranks} ranks: {dict(counts)}, {time.monotonic() - start:.0f} s")
    for reason, count in reasons.most_common():
        print(f"  {count:4}  {reason}")
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())

"""Plans with tensor parallelism run: outputs and all gradients are those of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from time import process_time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.api.profile import ModelProfile
from fxpipe.api.tensor_parallel import Candidate, candidate, shardings_of
from fxpipe.errors import PlanError
from fxpipe.ir.cluster.cluster import Cluster, Device, Link
from fxpipe.ir.plan.hybrid_plan import HybridPlan, HybridStage
from fxpipe.ir.plan.plan import with_modes
from fxpipe.pipe.results.planned import check, load
from fxpipe.planning.hybrid.group_layers import MOST, Layers, as_plan, costed, layers
from tests.helpers.marks import mostly_slow
from tests.helpers.models import Block


def fast(devices: int, kind: str = "cpu") -> Cluster:
    """So many devices, between which values move at once."""
    return Cluster.of([f"{kind}:{i}" for i in range(devices)], via=Link(("local", "local"), 1e14, 1e-9))


class Joined(nn.Module):
    """Attention whose queries, keys and values are one layer."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.join, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, width = x.shape
        q, k, v = self.join(self.norm(x)).view(b, n, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        return x + self.project(mixed.transpose(1, 2).reshape(b, n, width))


class Words(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.block = nn.Embedding(24, 16), Block(16, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.block(self.words(ids)), self.words.weight)


class Decoder(nn.Module):
    """A layer of today's language models: rotated queries and keys, fewer heads of these, a gated layer, root mean
    square norms; in front of it the words, and after it their scores."""

    def __init__(self, width: int = 16, heads: int = 4, keys: int = 2) -> None:
        super().__init__()
        self.size, self.shared, self.words = width // heads, heads // keys, nn.Embedding(24, width)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.query, self.mix = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, keys * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 24, bias=False) for _ in range(2))
        self.down, self.scores = nn.Linear(24, width, bias=False), nn.Linear(width, 24, bias=False)
        self.register_buffer("speeds", 100.0 ** -torch.linspace(0, 1, self.size // 2, dtype=torch.float64))

    def rotated(self, x: Tensor, angles: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat((-right, left), dim=-1) * angles.sin()

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.words(ids)
        b, n, width = x.shape
        at = torch.arange(n)[None, :].to(x.dtype)
        angles = (self.speeds[None, :, None].expand(at.shape[0], -1, 1) @ at[:, None, :]).transpose(1, 2)
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
        y = self.norms[0](x)
        queries, keys, values = (layer(y).view(b, n, -1, self.size).transpose(1, 2)
                                 for layer in (self.query, self.key, self.value))  # fmt: skip
        queries, keys = self.rotated(queries, angles), self.rotated(keys, angles)
        keys, values = (one[:, :, None].expand(-1, -1, self.shared, -1, -1).reshape(b, -1, n, self.size)
                        for one in (keys, values))  # fmt: skip
        seen = torch.ones(n, n, dtype=torch.bool).tril()[None, None]
        seen = seen if mask is None else seen & mask[:, None, None, :].bool()
        y = F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen)
        x = x + self.mix(y.transpose(1, 2).reshape(b, n, width))
        y = self.norms[1](x)
        return self.scores(x + self.down(F.silu(self.gate(y)) * self.up(y)))


def image() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32, 12), nn.Linear(12, 4),
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "blocks": (lambda: nn.Sequential(Block(16, 4), Block(16, 4)), lambda: torch.randn(8, 6, 16)),
    "joined": (lambda: nn.Sequential(Joined(), Joined(), Joined()), lambda: torch.randn(8, 6, 16)),
    "words": (Words, lambda: torch.randint(0, 24, (8, 6))),
    "decoder": (Decoder, lambda: torch.randint(0, 24, (8, 7))[:, :-1]),
    "image": (image, lambda: torch.randn(8, 4, 4, 4)),
    "mlp": (mlp, lambda: torch.randn(8, 16)),
}
PLANS: dict[str, dict[str, Any]] = {
    "two stages of two": {"tensor_parallel": 2, "planner": "straight", "micro_batches": 4, "recompute": False},
    "a stage of four": {"tensor_parallel": 4, "micro_batches": 2, "recompute": True},
    "two replicas of two": {"tensor_parallel": 2, "planner": "data parallel", "micro_batches": 2},
    "a stage of two": {"tensor_parallel": 2, "micro_batches": 2},
    "the best": {"tensor_parallel": (2, 4), "micro_batches": 4, "recompute": False},
}
PLANS["one stage of two recomputes"] = PLANS["two stages of two"]
MIXED: dict[str, tuple[tuple[int, tuple[int, ...]], ...]] = {  # of each stage the tensor-parallel size and the devices
    "two, then two replicas": ((2, (0, 1)), (1, (2, 3))),
    "two replicas, then two": ((1, (2, 3)), (2, (0, 1))),
    "one, two, one": ((1, (2,)), (2, (0, 1)), (1, (3,))),
    "two replicas of two, then four": ((2, (0, 1, 2, 3)), (4, (4, 5, 6, 7))),
    "four, then two": ((4, (0, 1, 2, 3)), (2, (4, 5))),
}
QUICK = {
    ("joined", "two stages of two"),
    ("decoder", "two stages of two"),
    ("blocks", "four, then two"),
    ("joined", "two, then two replicas"),
    ("blocks", "one stage of two recomputes"),
}
HOW = [plan for plan in (*PLANS, *MIXED) if plan != "a stage of two"]
GRID = [  # every other plan for each model, and the others for the next
    (name, how)
    for at, name in enumerate(MODELS)
    for turn, how in enumerate(HOW)
    if (at + turn) % 2 == 0 or (name, how) in QUICK
]


def loss(output: Tensor) -> Tensor:
    return (output * torch.linspace(1, 2, output[0].numel()).view(output.shape[1:])).pow(2).flatten(1).sum(1).mean()


def planned(name: str, how: str, devices: int = 4, kind: str = "cpu") -> tuple[nn.Module, Tensor, fxpipe.Planned]:
    torch.manual_seed(0)
    make, batch = MODELS[name]
    model, x = make().double(), batch()
    x = x.double() if x.is_floating_point() else x
    if how in MIXED:
        return model, x, mixed(model, x, how)
    found = fxpipe.plan(model, fast(devices, kind), 8, example_inputs=(x,), **PLANS[how])
    if how == "one stage of two recomputes":
        first, second = found.layers.stages
        layers = replace(found.layers, stages=(replace(first, recompute=True), second))
        found = replace(found, layers=layers, plan=with_modes(found.plan, ["always", "never"]))
    return model, x, found


def mixed(model: nn.Module, x: Tensor, how: str) -> fxpipe.Planned:
    """A plan by hand, whose stages have tensor-parallel sizes of their own and equally many layers."""
    own, count = MIXED[how], 2
    where = fast(max(device for _, devices in own for device in devices) + 1)
    known = fxpipe.profile(model, x, device=where)
    made, sizes = layers(known.graph, known, MOST), sorted({size for size, _ in own})
    found = [way_of(known.at(len(x) // count), made, where, size) for size in sizes]
    ends = [len(made.ops) * s // len(own) for s in range(len(own) + 1)]
    stages = tuple(
        HybridStage(a, b, devices, False, size, sizes.index(size))
        for (a, b), (size, devices) in zip(pairwise(ends), own, strict=True)
    )
    plan = HybridPlan(known.model, stages, count, samples=len(x) // count)
    ops = as_plan(known.graph, made, plan, where.labels, "1f1b")
    shardings = shardings_of(made, plan, found, len(x) // count)
    ways = tuple(one.way for one in found)
    hand = fxpipe.Planned(ops, plan, ways, where, len(x), "by hand", 4, shardings=shardings)
    check(hand)
    return hand


def way_of(known: ModelProfile, made: Layers, where: Cluster, size: int) -> Candidate:
    if size > 1:
        return candidate([known], made, where, size)
    return Candidate(1, where, (costed(known.graph, known, made),), ())


@pytest.mark.parametrize(("name", "how"), mostly_slow(GRID, lambda one: one in QUICK and "two stages" not in one[1]))
def test_a_plan_runs(name: str, how: str, tmp_path: Path) -> None:
    model, x, found = planned(name, how)
    plain, size = copy.deepcopy(model), found.layers.micro_batches
    outputs = [plain(part) for part in x.tensor_split(size)]
    sum(loss(part) / size for part in outputs).backward()  # type: ignore[union-attr]
    found.save(tmp_path / "plan.json")
    ours = copy.deepcopy(model)
    with closing(fxpipe.compile(ours, plan=tmp_path / "plan.json" if name == "joined" else found)) as pipe:
        total, output = pipe.step(x, loss_fn=lambda output: loss(output), outputs=True)
        assert torch.allclose(output, torch.cat(outputs), rtol=1e-9)
        assert torch.allclose(total, sum(loss(part) for part in outputs) / size)
        stages = zip(found.layers.stages, found.plan.stages, strict=True)
        modes = {found.cluster.labels[at]: one.checkpoint for stage, one in stages for at in stage.devices}
        assert all(stage.checkpoint == modes[stage.device] for stage in pipe.plan.stages)
    gradients = dict(ours.named_parameters())
    for key, parameter in plain.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(gradients[key].grad, parameter.grad, rtol=1e-9, atol=1e-12), key  # type: ignore[arg-type]
    for (key, buffer), (_, other) in zip(ours.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.allclose(buffer, other), key


def test_the_plan_decides() -> None:
    model, x, found = planned("mlp", "two stages of two")
    with pytest.raises(PlanError, match="chunks is 3, and the plan says 4"):
        fxpipe.compile(model, plan=found, chunks=3)
    with pytest.raises(PlanError, match="the plan is for 4 devices"):
        fxpipe.compile(model, plan=found, devices=3)
    with pytest.raises(PlanError, match="does not say how: give what"):
        fxpipe.compile(model, plan=found.plan, example_inputs=(x,))
    with closing(fxpipe.compile(model, plan=found)) as pipe:
        assert torch.allclose(pipe(x[:4]), model(x[:4]))


def test_a_plan_of_several_sizes_is_explained() -> None:
    _, _, found = planned("mlp", "one, two, one")
    text = replace(found, planner="optimal").explain()
    assert "tensor parallel 1:2:1" in text
    assert "data parallel DP, tensor parallel 1 " in text
    assert "data parallel DP, tensor parallel 2 " in text
    assert "twice the bandwidth" in text
    assert "more device" not in text


@pytest.mark.slow
def test_the_time_to_prepare_grows_with_layers() -> None:
    """And not with their square: each piece of a layer costs the same, however many there are."""

    def took(depth: int) -> float:
        with torch.device("meta"):
            model, x = nn.Sequential(*(Block(64, 8) for _ in range(depth))), torch.zeros(16, 8, 64)
        options = {"tensor_parallel": 8, "planner": "straight", "micro_batches": 2}
        found = fxpipe.plan(model, fast(16), 16, example_inputs=(x,), **options)  # type: ignore[arg-type]
        with closing(fxpipe.compile(model, plan=found)) as pipe:
            start = process_time()
            pipe.prepare(x)
            return process_time() - start

    took(2)  # what is imported and compiled once
    assert took(64) < 9 * took(8)


def small(memory: int) -> Cluster:
    """Two devices with a slow link, on which nothing is cut if memory does not ask for it."""
    devices = tuple(Device(f"cpu:{i}", memory, 1e12, 1e11, "local") for i in range(2))
    return Cluster(devices, (Link(("local", "local"), 1e9, 1e-5),))


@pytest.mark.parametrize("memory", [2_000_000, 1_500_000])
def test_where_memory_is_short_ops_are_cut_so_that_they_fit(memory: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = (nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.LayerNorm(64))
    model = nn.Sequential(*layers, nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).double()
    x = torch.randn(8, 64).double()
    options = {"tensor_parallel": 2, "micro_batches": 2, "recompute": False}
    roomy, found = (
        fxpipe.plan(model, small(most), 8, example_inputs=(x,), **options)  # type: ignore[arg-type]
        for most in (10**12, memory)
    )
    assert [one.prices for one in roomy.tried] == [(0.0,)]
    assert "The fastest way to cut ops of each size was searched, and no other." in roomy.explain()
    assert max(roomy.memory.values()) > memory >= max(found.memory.values())
    assert found.seconds > roomy.seconds
    (tried,) = found.tried
    assert tried.seconds is None  # with the fastest way to cut ops
    assert "no plan found that fits in memory" in tried.refusal
    assert len(tried.prices) == 3
    text = " ".join(found.explain().split())
    assert "proven optimal, with a tensor-parallel size of 2 (3 ways to cut ops) for each stage" in text
    assert "3 ways to cut ops, at prices of 0, " in text
    assert "with others there may be faster plans" in text
    found.save(tmp_path / "plan.json")
    assert load(tmp_path / "plan.json") == found
    plain, ours = copy.deepcopy(model), copy.deepcopy(model)
    sum(loss(plain(part)) / 2 for part in x.tensor_split(2)).backward()  # type: ignore[union-attr]
    with closing(fxpipe.compile(ours, plan=found)) as pipe:
        pipe.step(x, loss_fn=lambda output: loss(output))
    for own, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert own.grad is not None
        assert torch.allclose(own.grad, other.grad, rtol=1e-9, atol=1e-12)  # type: ignore[arg-type]


def test_planners_of_one_size_cut_ops_for_memory_too() -> None:
    model, x = mlp().double(), torch.randn(8, 16).double()

    def plan(memory: int) -> fxpipe.Planned:
        options = {"tensor_parallel": 2, "micro_batches": 2, "recompute": False, "planner": "data parallel"}
        return fxpipe.plan(model, small(memory), 8, example_inputs=(x,), **options)  # type: ignore[arg-type]

    roomy = plan(10**9)
    found = plan(max(roomy.memory.values()) - 1)
    assert roomy.seconds < found.seconds
    assert max(found.memory.values()) < max(roomy.memory.values())
    assert [len(one.prices) > 1 for one in (*roomy.tried, *found.tried)] == [False, True]


@pytest.mark.parametrize("sharding", ["auto", "zero1"])
def test_the_optimizer_is_sharded_where_that_makes_room(sharding: str) -> None:
    """Memory in which a stage on two replicas fits if these share out the optimizer's state."""
    model, x = mlp().double(), torch.randn(8, 16).double()
    parameters = sum(8 * one.numel() for one in model.parameters())
    memory = int(3.2 * parameters)
    found = fxpipe.plan(
        model, small(memory), 8, example_inputs=(x,), tensor_parallel=(1, 2), micro_batches=2, recompute=False,
        optimizer_sharding=sharding, most_layers=1,
    )  # fmt: skip
    check(found)
    assert max(found.memory.values()) <= memory
    (stage,) = found.layers.stages
    assert (stage.tensor_parallel, stage.replicas, found.layers.optimizer_sharding) == (1, 2, "zero1")

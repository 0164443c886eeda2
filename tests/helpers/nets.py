"""Small models for the tests of passes, each with something that a pass has to get right."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.graph.legal_cuts import legal_cuts
from fxpipe.ir.plan.plan import Plan, StagePlan


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Skips(nn.Module):
    """A value used one, two and three stages later, and by the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        skip = torch.tanh(self.a(x))
        y = torch.sin(skip)
        z = self.b(y) + skip
        w = torch.exp(z) * skip
        return w + x, skip


class Tied(nn.Module):
    """An embedding whose weight is the classifier's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.embed(x))
        h = torch.tanh(self.middle(h))
        h = F.linear(h, self.embed.weight)
        return F.linear(torch.tanh(h), self.middle.weight, self.embed.weight[0])


class Masked(nn.Module):
    """A mask made in front and used everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        rows = torch.arange(n, device=torch.device("cpu"))
        mask = (rows % 2).unsqueeze(1).to(torch.float64)
        kept = torch.ones((n, 4), dtype=torch.float64)
        kept[:, 0] = 0  # written in place: not cheap
        h = self.a(x) * mask
        h = torch.tanh(h) + kept * self.scale
        return self.b(h) * mask + rows.unsqueeze(1) * self.scale


class InPlace(nn.Module):
    """Values changed in place after others have seen them, themselves or through views; the input too."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        early = x + 1
        x.mul_(3)
        h = self.a(early)
        y = h + 1
        h.add_(y)
        h = F.relu(h, inplace=True) - 1
        pairs = h.view(-1, 2, 2)
        top = pairs[:, 0]
        first = torch.neg(y)
        top.mul_(2)
        z = h + first.repeat(1, 1)
        z[:, 1] = 0
        return z + x, pairs


class Norm(nn.BatchNorm1d):
    def _check_input_dim(self, input: Tensor) -> None:
        """Not while tracing."""


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), Norm(4), nn.Linear(4, 4)
        self.frozen = Norm(4).eval()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.a(x)))
        return self.frozen(self.b(h)) + h


class Counting(nn.Module):
    """Buffers that forward changes: one read again, one kept as an average, one whose new value leaves the stage."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        steps = self.steps.add_(1)
        g = torch.tanh(h) * self.steps
        self.average.mul_(0.9).add_(g.detach().mean(0), alpha=0.1)
        self.calls.add_(1)
        h = self.b(g)
        return torch.tanh(h) * steps


class Parts(nn.Module):
    """Tuples, and views of what a stage takes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        parts = torch.chunk(self.a(x), 2, dim=1)
        left, right = parts[0], parts[1]
        most = torch.max(left, dim=1)[0]
        both = torch.cat([right, left], dim=1).t()
        flat = both.reshape(4, -1)
        flat.mul_(2)
        return {"both": torch.tanh(flat.t()), "most": torch.exp(most), "x": x}


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.b(self.drop(torch.tanh(self.a(x)))))


NETS = (Chain, Skips, Tied, Masked, InPlace, Normed, Counting, Parts, Dropping)
BATCH = 6


def make(net: type[nn.Module]) -> tuple[nn.Module, Tensor]:
    """The model in float64 and a batch, always the same."""
    torch.manual_seed(1)
    return net().double(), torch.rand(BATCH, 4, dtype=torch.float64)


def plan(graph: Graph, *sizes: int, devices: tuple[str, ...] = (), checkpoint: str = "never", **more: bool) -> Plan:
    """A plan whose stages have these many ops."""
    assert sum(sizes) == len(graph.ops), f"{len(graph.ops)} ops"
    devices = devices or tuple(f"cpu:{index}" for index in range(len(sizes)))
    names = iter(op.name for op in graph.ops)
    stages = (
        StagePlan(tuple(next(names) for _ in range(size)), device, checkpoint)
        for size, device in zip(sizes, devices, strict=True)
    )
    return Plan(graph.model, tuple(stages), 4, **more)


def finest(graph: Graph, **more: bool) -> Plan:
    """A plan that cuts wherever it may, on two devices in turn."""
    cuts = [position for position, legal in enumerate(legal_cuts(graph)) if legal]
    sizes = [after - before for before, after in pairwise(cuts)]
    devices = tuple(f"cpu:{index % 2}" for index in range(len(sizes)))
    return plan(graph, *sizes, devices=devices, checkpoint="always", **more)

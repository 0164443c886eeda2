"""Small random networks, each as an operator graph and as the torch module that it stands for, and random strategies
for them: any degrees, any devices. What runs strategies is judged by these.

    images      convolutions, poolings, sums, concatenations; then flat, and on as vectors
    words       an embedding, linear layers, normalisation, attention of two heads, sums
    vectors     linear layers, steps of LSTM cells, softmax, sums, concatenations
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpipe.ir.operators.operators import Operator, OperatorGraph
from fxpipe.ir.operators.strategy import Config, Strategy, fits
from fxpipe.planning.operators.models import operator_kinds as kinds
from fxpipe.planning.operators.models.graph_builder import Draft
from fxpipe.planning.operators.strategy_space import fixed

HEADS, VOCAB = 2, 11
FEEDS: dict[str, Callable[[Draft, int], Operator]] = {
    "image": lambda add, batch: add(kinds.image("image", batch, 2, 7, 6)),
    "words": lambda add, batch: add(kinds.tokens("words", batch, 5)),
    "vector": lambda add, batch: add(kinds.features("vector", batch, 6)),
}
# By the number of dimensions of what they read.
STEPS = {
    4: ("conv2d", "conv2d", "pool2d", "sum", "concat", "flat"),
    3: ("linear", "linear", "layer_norm", "attention", "sum", "softmax"),
    2: ("linear", "linear", "lstm", "sum", "concat", "softmax"),
}


@dataclass(frozen=True)
class Step:
    """An operator: what it reads, and the arguments that it is made with. `relu` follows it if asked for."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    relu: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Network:
    """A network of some steps on one input; it returns what no step reads."""

    feed: str
    batch: int
    steps: tuple[Step, ...]
    graph: OperatorGraph

    @property
    def results(self) -> tuple[str, ...]:
        read = {name for step in self.steps for name in step.inputs}
        return tuple(step.name for step in self.steps if step.name not in read)

    def inputs(self) -> tuple[Tensor, ...]:
        """Its input in double precision, the same at every call."""
        sizes, random = self.graph.operator(self.feed).sizes, torch.Generator().manual_seed(0)
        if self.feed == "words":
            return (torch.randint(0, VOCAB, sizes, generator=random),)
        return (torch.randn(sizes, generator=random, dtype=torch.float64),)


def network(seed: int, most: int = 8) -> Network:
    """The network of this number, of up to `most` steps and one or two that end it."""
    random = Random(seed)
    feed, batch = random.choice(sorted(FEEDS)), random.randint(4, 8)
    add = Draft()
    made: dict[str, Operator] = {feed: FEEDS[feed](add, batch)}
    steps: list[Step] = []
    for at in range(random.randint(2, most)):
        candidates = [name for name in made if name != "words"] or ["words"]
        x = made[random.choice(candidates[-4:])]
        kind = "embedding" if x.name == "words" else random.choice(STEPS[len(x.sizes)])
        new = _steps(random, f"{kind}{at}", kind, x, list(made.values()))
        for step in new:
            made[step.name] = add(_operator(step, made))
        steps += new
    return Network(feed, batch, tuple(steps), add.graph(f"Random{seed}"))


def _steps(random: Random, name: str, kind: str, x: Operator, others: Sequence[Operator]) -> list[Step]:
    """The step of this kind that reads `x`, and others of its sizes where it reads several."""
    relu = random.random() < 0.4
    fitting = [o for o in others if o.sizes == x.sizes and o.name != x.name and o.kind != "input"]
    beside = [o for o in others if o.sizes[0] == x.sizes[0] and o.sizes[2:] == x.sizes[2:] and o.name != x.name]
    beside = [o for o in beside if len(o.sizes) == len(x.sizes) and o.name != "words"]
    if kind == "conv2d":
        window = random.choice(((1, 1), (3, 3), (3, 1), (2, 2)))
        options = {"channel": random.randint(2, 5), "window": window, "stride": random.choice((1, 1, 2)), "padding": 1}
        return [Step(name, kind, (x.name,), relu, options)]
    if kind == "pool2d" and min(x.sizes[2:]) >= 2:
        return [Step(name, kind, (x.name,), relu, {"window": 2, "stride": random.choice((1, 2))})]
    if kind == "flat":
        flat = Step(name, "flatten", (x.name,))
        return [flat, Step(f"{name}_linear", "linear", (name,), relu, {"channel": random.randint(2, 9)})]
    if kind == "sum" and fitting and x.kind != "input":
        return [Step(name, "elementwise", (x.name, random.choice(fitting).name), relu)]
    if kind == "concat" and beside:
        return [Step(name, "concat", (x.name, random.choice(beside).name), relu)]
    if kind == "attention":
        linear = [Step(f"{name}_{part}", "linear", (x.name,), False, {"channel": 2 * HEADS}) for part in "qkv"]
        return [
            *linear,
            Step(name, "scaled_dot_product", tuple(step.name for step in linear), options={"heads": HEADS}),
        ]
    if kind == "lstm":
        channel = random.randint(2, 5)
        states = [o for o in others if o.kind == "lstm" and o.sizes[1] == channel]
        read = (x.name, random.choice(states).name) if states else (x.name,)
        return [Step(name, kind, read, False, {"channel": channel})]
    if kind in ("layer_norm", "softmax"):
        return [Step(name, kind, (x.name,), kind == "layer_norm" and relu)]
    if kind == "embedding":
        return [Step(name, kind, (x.name,), relu, {"vocabulary": VOCAB, "channel": random.randint(2, 6)})]
    if len(x.sizes) == 4:
        return [Step(name, "conv2d", (x.name,), relu, {"channel": 3, "window": (1, 1), "stride": 1, "padding": 0})]
    return [Step(name, "linear", (x.name,), relu, {"channel": random.randint(2, 9)})]


def _operator(step: Step, made: Mapping[str, Operator]) -> Operator:
    xs = tuple(made[name] for name in step.inputs)
    if step.kind == "concat":
        return kinds.concat(step.name, xs)
    if step.kind == "lstm":
        return kinds.lstm(step.name, xs[0], xs[1] if len(xs) > 1 else None, **step.options)
    makers = {"conv2d": kinds.convolution, "pool2d": kinds.pooling}
    make: Callable[..., Operator] = makers.get(step.kind) or getattr(kinds, step.kind)
    return make(step.name, *xs, **step.options)


class Module(nn.Module):
    """The network, step by step."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network
        self.layers = nn.ModuleDict()
        for step in network.steps:
            x, operator = (network.graph.operator(name) for name in (step.inputs[0], step.name))
            options, layer = step.options, None
            if step.kind == "conv2d":
                numbers = (options["window"], options["stride"], options["padding"])
                layer = nn.Conv2d(x.sizes[1], options["channel"], *numbers)
            elif step.kind == "linear":
                layer = nn.Linear(x.sizes[-1], options["channel"])
            elif step.kind == "lstm":
                layer = nn.LSTMCell(x.sizes[1], options["channel"])
            elif step.kind == "embedding":
                layer = nn.Embedding(VOCAB, options["channel"])
            elif step.kind == "layer_norm":
                layer = nn.LayerNorm(operator.sizes[-1])
            if layer is not None:
                self.layers[step.name] = layer

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values = self.run(x, {})
        return tuple(values[name] for name in self.network.results)

    def run(self, x: Tensor, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        """What every step puts out."""
        values = {self.network.feed: x}
        for step in self.network.steps:
            values[step.name] = self.step(step, values, memory)
        return values

    def step(self, step: Step, values: Mapping[str, Tensor], memory: dict[str, Tensor]) -> Tensor:
        """One step; `memory` holds what LSTM cells keep besides what they put out."""
        xs = [values[name] for name in step.inputs]
        if step.kind == "lstm":
            state = (xs[1], memory[step.inputs[1]]) if len(xs) > 1 else None
            y, memory[step.name] = self.layers[step.name](xs[0], state)
        elif step.name in self.layers:
            y = self.layers[step.name](xs[0])
        else:
            y = plain(step, xs)
        return F.relu(y) if step.relu else y


def plain(step: Step, xs: Sequence[Tensor]) -> Tensor:
    """A step without weights."""
    if step.kind == "pool2d":
        return F.max_pool2d(xs[0], step.options["window"], step.options["stride"])
    if step.kind == "elementwise":
        return xs[0] + xs[1]
    if step.kind == "concat":
        return torch.cat(list(xs), dim=1)
    if step.kind == "flatten":
        return xs[0].flatten(1)
    if step.kind == "softmax":
        return F.softmax(xs[0], dim=-1)
    heads = [x.view(x.shape[0], x.shape[1], HEADS, -1).transpose(1, 2) for x in xs]
    y = F.scaled_dot_product_attention(*heads).transpose(1, 2)
    return y.reshape(y.shape[0], y.shape[1], -1)


def module(network: Network) -> Module:
    """The module in double precision, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Module(network).double()


def strategy(graph: OperatorGraph, devices: int, random: Random, holders: int = 1) -> Strategy:
    """Every operator cut anyhow into at most `devices` parts, or twice as many, with up to so many holders of each
    region, each part on any device."""
    return Strategy(tuple(fixed(o) if o.kind == "input" else _config(o, devices, random, holders) for o in graph))


def _config(operator: Operator, devices: int, random: Random, holders: int) -> Config:
    left = random.choice((1, devices, devices, 2 * devices))
    held = random.randint(1, min(holders, operator.summed or holders))
    degrees = [1] * len(operator.output)
    for at in random.sample(range(len(degrees)), len(degrees)):
        most = min(left, operator.sizes[at]) if operator.roles[at] else 1
        degrees[at] = random.choice([d for d in range(1, most + 1) if fits(operator.output[at], d)])
        left //= degrees[at]
    parts = held * int(torch.tensor(degrees).prod())
    return Config(tuple(degrees), tuple(random.randrange(devices) for _ in range(parts)), held)

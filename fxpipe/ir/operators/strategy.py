"""A strategy of operator-level parallelism: into how many parts each dimension of each operator's output is cut, and
which device computes each part.

    operator  cut              devices
    conv1     sample/4         0 1 2 3
    fc6       channel/4        0 1 2 3
    fc7       sample/2 channel/2  0 1 2 3

Parts are as even as possible, larger ones first, and numbered with the last dimension running fastest. Devices are
numbered as in the cluster. Several parts may be on one device.

Each region of an output may have several holders. If the operator sums products over a dimension (the input channels of
a linear layer), this dimension is cut between the holders: each computes a partial sum, and an all-reduce adds them, so
that afterwards each has the region. Other operators have copies: each holder computes all of the region. These are the
layouts of Megatron-LM (Shoeybi et al., 2019):

    operator  cut              holders  devices
    fc1       channel/4              1  0 1 2 3   by columns
    fc2       summed/4               4  0 1 2 3   by rows
    norm      copies/4               4  0 1 2 3

Parts with the same region are neighbours: of all numbers, that of the holder runs fastest.

A step may run as several micro-batches, one after the other, whose gradients are added up; parts are then parts of a
micro-batch. And groups of operators may be recomputed: in backward, each device runs its parts of such a group again,
from what they read of other groups and of other devices (Chen et al., "Training deep nets with sublinear memory cost",
2016).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod

from .operators import Dimension, Operator, OperatorGraph, micro_batch

Region = tuple[tuple[int, int], ...]  # for each dimension the first index and the one after the last


@dataclass(frozen=True)
class Config:
    """How one operator is computed.

    - `degrees`: the number of parts in each dimension of the output.
    - `devices`: the device of each part, `prod(degrees) * holders` of them.
    - `holders`: how many parts have the same region of the output.
    """

    degrees: tuple[int, ...]
    devices: tuple[int, ...]
    holders: int = 1

    @cached_property
    def parts(self) -> int:
        return prod(self.degrees) * self.holders


@dataclass(frozen=True)
class Strategy:
    """How a step is computed. Check with `check`.

    - `configs`: a config for each operator, in the graph's order.
    - `micro_batches`: into how many equal parts the samples of a step are cut.
    - `recomputed`: the groups of operators, by name, that are computed again in backward.
    """

    configs: tuple[Config, ...]
    micro_batches: int = 1
    recomputed: tuple[tuple[str, ...], ...] = ()

    def replace(self, at: int, config: Config) -> Strategy:
        """The strategy with another config for the operator at position `at`."""
        return replace(self, configs=(*self.configs[:at], config, *self.configs[at + 1 :]))

    @cached_property
    def group_of(self) -> dict[str, int]:
        """For each operator that is recomputed, by name, the number of its group."""
        return {name: number for number, group in enumerate(self.recomputed) for name in group}


def split(size: int, degree: int, part: int) -> tuple[int, int]:
    """The range of part number `part` when `size` is cut into `degree` parts.

    >>> [split(10, 4, part) for part in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    base, longer = divmod(size, degree)
    return part * base + min(part, longer), (part + 1) * base + min(part + 1, longer)


def fits(dimension: Dimension, degree: int) -> bool:
    """Whether a dimension cut into `degree` parts is cut between multiples of its step."""
    return all(split(dimension.size, degree, part)[0] % dimension.step == 0 for part in range(degree))


def regions(operator: Operator, config: Config) -> tuple[Region, ...]:
    """The region of the output that each part computes, in order of parts."""
    return tuple(region for region in _cut(operator, config) for _ in range(config.holders))


def summed_regions(operator: Operator, config: Config) -> tuple[Region, ...]:
    """As `regions`, where each region ends with the range of the summed dimension that the part adds up; (0, 0) for an
    operator without one."""
    cut = config.holders if operator.summed else 1
    ranges = [split(operator.summed, cut, at % cut) for at in range(config.holders)]
    return tuple((*region, added) for region in _cut(operator, config) for added in ranges)


def _cut(operator: Operator, config: Config) -> Iterator[Region]:
    """The regions of the output, each once."""
    return product(
        *(
            [split(size, degree, part) for part in range(degree)]
            for size, degree in zip(operator.sizes, config.degrees, strict=True)
        )
    )


def check_config(operator: Operator, config: Config, devices: int) -> None:
    """Raise ValueError if `config` is not one for `operator` on `devices` devices."""
    where = f"operator {operator.name!r}"
    if len(config.degrees) != len(operator.output):
        raise ValueError(
            f"{where} has {len(operator.output)} dimensions, but its config has degrees for {len(config.degrees)}"
        )
    for dimension, degree in zip(operator.output, config.degrees, strict=True):
        if degree < 1 or degree > dimension.size:
            raise ValueError(f"{where}: {dimension.name} of size {dimension.size} cannot be cut into {degree} parts")
        if degree > 1 and not dimension.role:
            raise ValueError(f"{where}: {dimension.name} cannot be cut; it can be in {_cuttable(operator)}")
        if not fits(dimension, degree):
            steps = f"{dimension.name} of size {dimension.size} is cut between multiples of {dimension.step}"
            raise ValueError(f"{where}: {steps}, so not into {degree} equal parts")
    if config.holders < 1:
        raise ValueError(f"{where} has {config.holders} holders of each region; there is at least 1")
    if operator.kind == "input" and config.holders > 1:
        raise ValueError(f"{where} is fed in, so it has no copies; write holders=1")
    if 0 < operator.summed < config.holders:
        raise ValueError(
            f"{where} sums over {operator.summed} numbers, which cannot be cut for {config.holders} holders"
        )
    if len(config.devices) != config.parts:
        raise ValueError(f"{where} has {config.parts} parts, but {len(config.devices)} devices are named for them")
    for device in config.devices:
        if not 0 <= device < devices:
            raise ValueError(f"{where} is put on device {device}; there are devices 0 to {devices - 1}")


def _cuttable(operator: Operator) -> str:
    return ", ".join(dimension.name for dimension in operator.output if dimension.role) or "no dimension"


def check(graph: OperatorGraph, strategy: Strategy, devices: int) -> None:
    """Raise ValueError if the strategy does not fit the graph or a cluster of `devices` devices."""
    if len(strategy.configs) != len(graph):
        raise ValueError(
            f"{graph.name} has {len(graph)} operators, but the strategy has {len(strategy.configs)} configs"
        )
    if strategy.micro_batches < 1:
        raise ValueError(f"the strategy has {strategy.micro_batches} micro-batches; a step has at least 1")
    for operator, config in zip(micro_batch(graph, strategy.micro_batches), strategy.configs, strict=True):
        check_config(operator, config, devices)
    seen = set[str]()
    for name in (name for group in strategy.recomputed for name in group):
        if name not in graph.positions:
            raise ValueError(f"the strategy recomputes {name!r}, and {graph.name} has no such operator")
        if name in seen:
            raise ValueError(f"the strategy recomputes operator {name!r} twice; name it in one group")
        seen.add(name)


def cut(operator: Operator, config: Config) -> str:
    """How the operator is cut, in words: "sample/2 channel/2", "summed/2", "copies/2", or "whole"."""
    names = [dimension.name for dimension in operator.output]
    pairs = zip((*names, shared(operator)), (*config.degrees, config.holders), strict=True)
    return " ".join(f"{name}/{degree}" for name, degree in pairs if degree > 1) or "whole"


def shared(operator: Operator) -> str:
    """What several holders of a region are, in a word."""
    return "summed" if operator.summed else "copies"


def by_name(graph: OperatorGraph, strategy: Strategy) -> dict[str, Config]:
    """The config of each operator, by its name; `of_names` is the inverse."""
    return {operator.name: config for operator, config in zip(graph, strategy.configs, strict=True)}


def of_names(
    graph: OperatorGraph,
    configs: Mapping[str, Config],
    devices: int,
    micro_batches: int = 1,
    recomputed: tuple[tuple[str, ...], ...] = (),
) -> Strategy:
    """The strategy with these configs, by operator. Raises ValueError if they do not fit the graph."""
    if strange := sorted(configs.keys() ^ graph.positions.keys()):
        raise ValueError(f"the strategy and {graph.name} do not have the same operators: {', '.join(strange[:5])}")
    strategy = Strategy(tuple(configs[operator.name] for operator in graph), micro_batches, recomputed)
    check(graph, strategy, devices)
    return strategy

"""Bytes that a strategy needs on each device.

    weights       each share of an operator's weights, on every device that holds it, times the copies of parameters
    activations   what each part puts out, and what it reads beyond an even share of its inputs (a linear layer that is
                  cut by channels has all of its input on each device)

A device keeps the activations of one micro-batch from forward to backward. `OperatorGraph.kept` says how many numbers
are kept for each that is put out.

Of a group of operators that is recomputed, a device keeps less: what its parts put out for operators outside the group,
what they read from outside it beyond an even share, what they received from other devices, and the sums that several
devices add up. While a group's backward runs, the device has all activations of the group again, but no longer those of
the operators after it, whose backward is done:

    operators   a  b* c* d  e* f      * recomputed, in the groups b c and e
    at the end of forward             kept: all of a d f, and of c and e what they put out
    backward of e                     no longer f; e again
    backward of b and c               no longer d e f; b and c again
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fxpipe.ir.operators.operators import Operator, OperatorGraph, micro_batch
from fxpipe.ir.operators.strategy import Config, Strategy, summed_regions

from .input_regions import reads, volume
from .task_graph import holders, overlaps, weight_groups


def held(graph: OperatorGraph, strategy: Strategy, devices: int, copies: float) -> list[float]:
    """Bytes on each device; `copies` is how many bytes are in memory for each byte of weights."""
    graph = micro_batch(graph, strategy.micro_batches)
    found = [0.0] * devices
    again = [[0.0] * devices for _ in strategy.recomputed]  # by group
    after = [[0.0] * devices for _ in strategy.recomputed]  # of operators after the group
    outside, ends = leaving(graph, strategy.recomputed), group_ends(graph, strategy.recomputed)

    def keep(device: int, at: int, size: float) -> None:
        found[device] += size
        for own, end in zip(after, ends, strict=True):
            own[device] += size if at > end else 0.0

    for at, (operator, config) in enumerate(zip(graph, strategy.configs, strict=True)):
        if operator.kind == "input":
            continue
        group = strategy.group_of.get(operator.name)
        for device, one in zip(config.devices, bytes_of(graph, operator, config), strict=True):
            kept = size = one.activations(graph.kept)
            if group is not None:
                inner = [strategy.group_of.get(name) == group for name in operator.inputs]
                kept = one.when_recomputed(operator.name in outside, inner)
                again[group][device] += max(0.0, size - kept)
            keep(device, at, kept)
    for device, at, size in _received(graph, strategy):
        keep(device, at, size)
    for weights in weight_groups(graph).values():
        shares = holders(graph, strategy, weights)
        size = copies * graph.operators[weights[0]].weights * graph.element / len(shares)
        for share in shares:
            for device in share.devices:
                found[device] += size
    for device in range(devices):
        more = (new[device] - old[device] for new, old in zip(again, after, strict=True))
        found[device] += max([0.0, *more])
    return found


@dataclass(frozen=True)
class PartBytes:
    """Bytes of a part: what it puts out, and what it reads of each input beyond an even share. `sums`: whether it is
    one of several partial sums."""

    output: float
    beyond: tuple[float, ...]
    sums: bool

    def activations(self, kept: float) -> float:
        """What is kept for backward, if `kept` numbers are for each that is put out."""
        return (self.output + sum(self.beyond)) * kept

    def when_recomputed(self, leaves: bool, inner: Sequence[bool]) -> float:
        """What is kept for backward if the operator is recomputed, without what other parts of its group send.
        `leaves`: whether it is read outside its group; `inner`: of each input, whether it is in the group."""
        output = self.output if leaves or self.sums else 0.0
        return output + sum(size for size, inside in zip(self.beyond, inner, strict=True) if not inside)


def bytes_of(graph: OperatorGraph, operator: Operator, config: Config) -> list[PartBytes]:
    """The bytes of each part."""
    inputs = [graph.operator(name) for name in operator.inputs]
    found = []
    for region in summed_regions(operator, config):
        taken = zip(reads(graph, operator, region), inputs, strict=True)
        beyond = tuple(
            max(0.0, volume(wanted) - one.elements / config.parts) * graph.element if one.kind != "input" else 0.0
            for wanted, one in taken
        )
        sums = operator.summed > 0 and config.holders > 1
        found.append(PartBytes(volume(region[:-1]) * graph.element, beyond, sums))
    return found


def leaving(graph: OperatorGraph, groups: Sequence[Sequence[str]]) -> set[str]:
    """The operators of these groups that are read outside their group, or by none."""
    group_of = {name: number for number, group in enumerate(groups) for name in group}
    readers: dict[str, list[int | None]] = {}
    for operator in graph:
        for name in operator.inputs:
            readers.setdefault(name, []).append(group_of.get(operator.name))
    return {name for name, own in group_of.items() if any(one != own for one in readers.get(name, [None]))}


def group_ends(graph: OperatorGraph, groups: Sequence[Sequence[str]]) -> list[int]:
    """The position of the last operator of each group."""
    return [max(graph.positions[name] for name in group) for group in groups]


def _received(graph: OperatorGraph, strategy: Strategy) -> Iterator[tuple[int, int, float]]:
    """(device, position of the operator, bytes) of what each part gets of its own group from another device."""
    group_of = strategy.group_of
    for i, j, which in graph.edges:
        producer, consumer = graph.operators[i], graph.operators[j]
        made, taken = strategy.configs[i], strategy.configs[j]
        group = group_of.get(consumer.name)
        if group is None or group_of.get(producer.name) != group or producer.kind == "input":
            continue
        for r, m, elements in overlaps(graph, consumer, which, made, taken):
            if taken.devices[m] not in made.devices[r * made.holders : (r + 1) * made.holders]:
                yield taken.devices[m], j, elements * graph.element

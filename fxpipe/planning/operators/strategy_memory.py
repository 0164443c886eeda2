"""Bytes that a strategy needs on each device.

    weights       each share of an operator's weights, on every device that holds it, times the copies of parameters
    activations   what each part puts out, and what it reads beyond an even share of its inputs (a linear layer that is
                  cut by channels has all of its input on each device)

A step without micro-batches keeps all activations from forward to backward. `OperatorGraph.kept` says how many numbers
are kept for each that is put out.
"""

from __future__ import annotations

from fxpipe.ir.operators.operators import Operator, OperatorGraph
from fxpipe.ir.operators.strategy import Config, Strategy, summed_regions

from .input_regions import reads, volume
from .task_graph import holders, weight_groups


def held(graph: OperatorGraph, strategy: Strategy, devices: int, copies: float) -> list[float]:
    """Bytes on each device; `copies` is how many bytes are in memory for each byte of weights."""
    found = [0.0] * devices
    for operator, config in zip(graph, strategy.configs, strict=True):
        if operator.kind != "input":
            for device, size in zip(config.devices, activations(graph, operator, config), strict=True):
                found[device] += size
    for group in weight_groups(graph).values():
        shares = holders(graph, strategy, group)
        size = copies * graph.operators[group[0]].weights * graph.element / len(shares)
        for share in shares:
            for device in share.devices:
                found[device] += size
    return found


def activations(graph: OperatorGraph, operator: Operator, config: Config) -> list[float]:
    """Bytes that each part keeps for its backward."""
    inputs = [graph.operator(name) for name in operator.inputs]
    found = []
    for region in summed_regions(operator, config):
        taken = zip(reads(graph, operator, region), inputs, strict=True)
        beyond = sum(
            max(0.0, volume(wanted) - one.elements / config.parts) for wanted, one in taken if one.kind != "input"
        )
        found.append((volume(region[:-1]) + beyond) * graph.element * graph.kept)
    return found

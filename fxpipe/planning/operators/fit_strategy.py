"""A strategy for another graph of the same model: with another number of samples, or with a loss.

Operators are matched by name. Those that a training step adds (the loss and what leads to it) have no weights; they are
cut between samples like their first input, each part on the device of that input's part.
"""

from __future__ import annotations

from math import prod

from fxpipe.ir.operators.operators import Operator, OperatorGraph
from fxpipe.ir.operators.strategy import Config, Strategy, check


def fit(graph: OperatorGraph, strategy: Strategy, other: OperatorGraph, devices: int, later: bool = False) -> Strategy:
    """The `strategy` of `graph`, for `other`, which is as large as a micro-batch. Raises ValueError, with the operator,
    if that is another model. `later`: it is a further kind of call of the same model, which may have operators with
    weights that the strategy does not know."""
    known = dict(zip(graph.positions, strategy.configs, strict=True))
    found: dict[str, Config] = {}
    for operator in other:
        config = known.get(operator.name)
        if config is None or not _alike(graph.operator(operator.name), operator):
            if operator.weights and not later:
                raise ValueError(_strange(graph, operator))
            config = _follow(operator, found)
        found[operator.name] = config
    here = (tuple(name for name in group if name in found) for group in strategy.recomputed)
    fitted = Strategy(tuple(found.values()), recomputed=tuple(group for group in here if group))
    check(other, fitted, devices)
    return fitted


def _alike(one: Operator, other: Operator) -> bool:
    """Whether two operators differ at most in the number of samples."""
    return (one.kind, one.roles, one.sizes[1:]) == (other.kind, other.roles, other.sizes[1:])


def _strange(graph: OperatorGraph, operator: Operator) -> str:
    if operator.name not in graph.positions:
        return f"the strategy is for {graph.name} without an operator {operator.name!r}, which the model has"
    known = graph.operator(operator.name)
    return (
        f"the strategy is for another {graph.name}: its operator {operator.name!r} puts out {_output(known)}, and the "
        f"model's {_output(operator)}"
    )


def _output(operator: Operator) -> str:
    return ", ".join(map(str, operator.output[1:]))


def _follow(operator: Operator, found: dict[str, Config]) -> Config:
    """The config of an operator that is cut between samples like its first input, and not otherwise."""
    rest = (1,) * (len(operator.output) - 1)
    if not operator.inputs:
        return Config((1, *rest), (0,))
    first = found[operator.inputs[0]]
    each = prod(first.degrees[1:]) * first.holders
    if operator.output[0].role != "S" or first.degrees[0] > operator.sizes[0]:
        return Config((1, *rest), first.devices[:1])
    return Config((first.degrees[0], *rest), first.devices[::each])

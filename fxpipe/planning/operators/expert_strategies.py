"""Strategies that people use: data parallel, model parallel, and the experts' for convolutional and recurrent networks.
They are what a search starts from and is compared with."""

from __future__ import annotations

from math import prod
from random import Random

from fxpipe.ir.operators.operators import Operator, OperatorGraph
from fxpipe.ir.operators.strategy import Config, Strategy

from .strategy_space import configs, fixed, place

FULLY_CONNECTED = frozenset({"linear", "projected_softmax"})


def data_parallel(graph: OperatorGraph, devices: int) -> Strategy:
    """Every operator cut by sample over all devices (as many as divide them, where there are fewer samples)."""
    return Strategy(tuple(_cut_by("S", operator, devices) for operator in graph))


def model_parallel(graph: OperatorGraph, devices: int) -> Strategy:
    """Every operator whole on one device, and a run of operators on each, of about equal work."""
    work = [operator.work * operator.elements for operator in graph]
    total, done, found = sum(work) or 1.0, 0.0, []
    for operator, own in zip(graph, work, strict=True):
        device = min(devices - 1, int(devices * (done + own / 2) / total))
        found.append(
            fixed(operator) if operator.kind == "input" else place(operator, (1,) * len(operator.output), device)
        )
        done += own
    return Strategy(tuple(found))


def one_device(graph: OperatorGraph) -> Strategy:
    """Everything whole on the first device: no communication, and no help from the others."""
    return Strategy(tuple(Config((1,) * len(operator.output), (0,)) for operator in graph))


def krizhevsky(graph: OperatorGraph, devices: int) -> Strategy:
    """Fully-connected layers cut by parameter, all else by sample (Krizhevsky, "One weird trick for parallelizing
    convolutional neural networks", 2014)."""
    return Strategy(
        tuple(_cut_by("P" if operator.kind in FULLY_CONNECTED else "S", operator, devices) for operator in graph)
    )


def depth_parallel(graph: OperatorGraph, devices: int) -> Strategy:
    """Each layer of a recurrent network, all steps of it, on a device of its own, layers in turn; where there are more
    devices than layers, each layer cut by sample over a group of them (Wu et al., "Google's neural machine translation
    system", 2016, which the SOAP paper takes as the expert strategy). Operators of one `shared` name are a layer; those
    without weights stay with the operator before them."""
    layers = list(dict.fromkeys(o.weight_group for o in graph if o.weights)) or [""]
    each = max(1, devices // len(layers))
    groups = devices // each
    found, group = [], 0
    for operator in graph:
        if operator.weights:
            group = layers.index(operator.weight_group) % groups
        found.append(_cut_by("S", operator, each, first=group * each))
    return Strategy(tuple(found))


def expert(graph: OperatorGraph, devices: int) -> Strategy:
    """`depth_parallel` for networks with LSTM layers, `krizhevsky` for others."""
    recurrent = any(operator.kind == "lstm" for operator in graph)
    return depth_parallel(graph, devices) if recurrent else krizhevsky(graph, devices)


def scattered(graph: OperatorGraph, devices: int, random: Random, roles: str = "SAP") -> Strategy:
    """A config drawn for each operator, all that `strategy_space.configs` allows equally likely."""
    return Strategy(tuple(random.choice(configs(operator, devices, roles)) for operator in graph))


def _cut_by(role: str, operator: Operator, devices: int, first: int = 0) -> Config:
    """The first dimension of this role cut into as many parts as divide `devices`, on neighbouring devices; where the
    operator has none, by sample."""
    if operator.kind == "input":
        return fixed(operator)
    roles = operator.roles
    at = next((i for wanted in (role, "S") for i, r in enumerate(roles) if r == wanted), None)
    degrees = [1] * len(roles)
    if at is not None:
        degrees[at] = max(d for d in range(1, devices + 1) if devices % d == 0 and d <= operator.sizes[at])
    assert prod(degrees) <= devices
    return place(operator, tuple(degrees), first)

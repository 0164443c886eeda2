"""Strategies that people use: data parallel, model parallel, and the experts' for convolutional and recurrent networks.
A search starts from them and is compared with them."""

from __future__ import annotations

from math import prod
from random import Random

from fxpipe.ir.operators.operators import Operator, OperatorGraph
from fxpipe.ir.operators.strategy import Config, Strategy, fits

from .strategy_space import configs, fixed, place

FULLY_CONNECTED = frozenset({"linear", "projected_softmax"})
CHANNELWISE = frozenset({"scaled_dot_product", "elementwise"})  # a range of channels needs no other ones


def data_parallel(graph: OperatorGraph, devices: int) -> Strategy:
    """Every operator cut by sample over all devices; with fewer samples, into the most parts that divide `devices`."""
    return Strategy(tuple(_cut_by("S", operator, devices) for operator in graph))


def model_parallel(graph: OperatorGraph, devices: int) -> Strategy:
    """Every operator whole; each device has a run of neighbouring operators, of about equal work."""
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
    """Each layer of a recurrent network, with all its steps, on one device, layers dealt to devices in turn; with more
    devices than layers, each layer cut by sample over a group of them (Wu et al., "Google's neural machine translation
    system", 2016, the expert strategy of the SOAP paper). Operators of one `shared` name are a layer; those without
    weights stay with the operator before them."""
    layers = list(dict.fromkeys(o.weight_group for o in graph if o.weights)) or [""]
    each = max(1, devices // len(layers))
    groups = devices // each
    found, group = [], 0
    for operator in graph:
        if operator.weights:
            group = layers.index(operator.weight_group) % groups
        found.append(_cut_by("S", operator, each, first=group * each))
    return Strategy(tuple(found))


def megatron(graph: OperatorGraph, devices: int) -> Strategy:
    """Tensor parallelism over all devices (Shoeybi et al., "Megatron-LM", 2019, section 3). Of linear layers in pairs,
    with nothing but attention, activations and the like between, the first is cut by channel, the second by what it
    sums over; so are an embedding and a linear layer without a pair. All other operators have a copy on each device."""
    inner = _between_pairs(graph, devices)
    found = []
    for operator in graph:
        whole = (1,) * len(operator.output)
        if operator.kind == "input":
            found.append(fixed(operator))
        elif operator.name in inner:
            found.append(place(operator, (*whole[:-1], devices), 0))
        else:
            found.append(place(operator, whole, 0, 1 if 0 < operator.summed < devices else devices))
    return Strategy(tuple(found))


def _between_pairs(graph: OperatorGraph, devices: int) -> set[str]:
    """The operators that are cut by channel: the first of each pair of linear layers, and what is between the two."""
    readers: dict[str, list[Operator]] = {operator.name: [] for operator in graph}
    for operator in graph:
        for name in operator.inputs:
            readers[name].append(operator)
    cuttable = {o.name for o in graph if o.output[-1].role and o.sizes[-1] >= devices and fits(o.output[-1], devices)}
    while True:
        inner: set[str] = set()
        for o in graph:
            fed = [name in inner for name in o.inputs]
            first, between = o.kind in FULLY_CONNECTED and not any(fed), o.kind in CHANNELWISE and all(fed)
            if o.name in cuttable and (first or between):
                inner.add(o.name)

        def second(o: Operator, inner: set[str] = inner) -> bool:
            return o.name not in inner and o.kind in FULLY_CONNECTED and o.summed >= devices

        def stays(o: Operator, inner: set[str] = inner) -> bool:
            return o.name in inner and o.kind in CHANNELWISE

        wrong = {name for name in inner if not readers[name] or not all(stays(r) or second(r) for r in readers[name])}
        if not wrong:
            return inner
        cuttable -= wrong


def expert(graph: OperatorGraph, devices: int) -> Strategy:
    """`depth_parallel` for networks with LSTM layers, `krizhevsky` for others."""
    recurrent = any(operator.kind == "lstm" for operator in graph)
    return depth_parallel(graph, devices) if recurrent else krizhevsky(graph, devices)


def scattered(graph: OperatorGraph, devices: int, random: Random, roles: str = "SAP") -> Strategy:
    """A random config for each operator, uniform over those of `strategy_space.configs`."""
    return Strategy(tuple(random.choice(configs(operator, devices, roles)) for operator in graph))


def _cut_by(role: str, operator: Operator, devices: int, first: int = 0) -> Config:
    """The first dimension of this role cut into the most parts that divide `devices`, on neighbouring devices from
    `first` on; an operator without such a dimension is cut by sample."""
    if operator.kind == "input":
        return fixed(operator)
    roles = operator.roles
    at = next((i for wanted in (role, "S") for i, r in enumerate(roles) if r == wanted), None)
    degrees = [1] * len(roles)
    if at is not None:
        degrees[at] = max(d for d in range(1, devices + 1) if devices % d == 0 and d <= operator.sizes[at])
    assert prod(degrees) <= devices
    return place(operator, tuple(degrees), first)

"""Numbers over the whole batch: each part is summed by itself, and the sums are added once, on the first part's device.

A mean is the total sum divided by the number of elements, or, for losses over labels, by the weight of all labels that
count, which is summed part by part, too.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from fxpipe.ir.graph.graph import Op, Ref, op_name
from fxpipe.ir.graph.op_arguments import argument, arguments
from fxpipe.ir.graph.ops import LABEL_LOSSES, LOSSES, PAIR_LOSSES
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.operators.strategy import Region
from fxpipe.passes.sharding.graph_rewriter import GraphRewriter, Part
from fxpipe.passes.sharding.part_regions import Place, Places, extent
from fxpipe.passes.sharding.sharding_rule import Called, Rule, each, every


def _reduction(op: Op) -> str:
    """How a loss is reduced; "" for a way that is not known."""
    if op.target is not getattr(F, op_name(op), None):
        return ""
    given = arguments(op)
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return ""
    return str(given["reduction"])


def _classes(b: GraphRewriter, op: Op) -> int:
    """The dimension of the classes."""
    return 1 if len(b.shape(arguments(op)["input"].name)) > 1 else 0


def _label_cuts(b: GraphRewriter, op: Op) -> Iterable[int]:
    """Any dimension of the scores except that of the classes."""
    if _reduction(op) not in ("mean", "sum", "none"):
        return ()
    dims = range(len(b.shape(arguments(op)["input"].name)))
    return [dim for dim in dims if dim != _classes(b, op)]


def _read(b: GraphRewriter, op: Op, region: Region, device: int) -> dict[str, Any]:
    """The arguments of a loss over a region of the scores."""
    given, classes = arguments(op), _classes(b, op)
    probable = len(b.shape(given["target"].name)) == len(region)
    of_target = region if probable else (*region[:classes], *region[classes + 1 :])
    changed = {
        "input": b.read(op, given["input"], region, device),
        "target": b.read(op, given["target"], of_target, device),
    }
    if given.get("weight") is not None:
        changed["weight"] = b.read(op, given["weight"], None, device)
    return changed


def _changed(op: Op, changed: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a call needs, by name: those that differ from the default."""
    assert callable(op.target)
    defaults = {name: p.default for name, p in inspect.signature(op.target).parameters.items()}
    given = {**arguments(op), **changed}
    return {n: v for n, v in given.items() if n not in ("input", "target") and (isinstance(v, Ref) or v != defaults[n])}


def _labelled(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    """A loss over labels, such as cross entropy, to a number: `places` are those of the scores."""
    sums, weights = [], []
    for name, place in zip(_names(b, op, places), places, strict=True):
        read = _read(b, op, place.region, place.device)
        kwargs = _changed(op, {**read, "reduction": "sum"})
        sums.append(b.add(op, name, place.device, op.target, (read["input"], read["target"]), kwargs))
        if _reduction(op) == "mean":
            weights.append(_weight(b, op, name, place, read))
    return _combined(b, op, sums, weights, places[0].device)


def _weight(b: GraphRewriter, op: Op, name: str, place: Place, read: Mapping[str, Any]) -> str | float:
    """The weight of the labels of a part that count: the name of a value, or a number if all labels count."""
    given, target = arguments(op), read["target"]
    type = b.tensor(target.name)
    if len(type.shape) == len(place.region):  # probabilities of the classes
        return prod(extent(place.region)) / extent(place.region)[_classes(b, op)]

    def step(stem: str, call: Any, args: tuple[Any, ...], type: TensorType) -> Ref:
        return Ref(b.glue(op, f"{name}_{stem}", place.device, call, args, type))

    counts = step("counts", torch.ne, (target, given["ignore_index"]), replace(type, dtype="bool"))
    if "weight" not in read:
        return step("count", torch.sum, (counts,), replace(type, shape=())).name
    labels = step("labels", torch.where, (counts, target, 0), type)
    each = replace(b.typed(read["weight"].name, ()), shape=type.shape)
    of_labels = step("weights", operator.getitem, (read["weight"], labels), each)
    counted = step("counted", operator.mul, (of_labels, counts), each)
    return step("weight", torch.sum, (counted,), replace(each, shape=())).name


def _names(b: GraphRewriter, op: Op, places: Places) -> list[str]:
    return [b.free(f"{op.name}_{at}") for at in range(len(places))]


def _combined(
    b: GraphRewriter, op: Op, sums: Sequence[str], weights: Sequence[str | float], device: int
) -> tuple[Part, ...]:
    """The sum of the sums, divided by the sum of the weights if there are any."""
    place = Place((), device)
    (name,) = b.part_names(op, (place,))
    numbers = [weight for weight in weights if not isinstance(weight, str)]
    names = [weight for weight in weights if isinstance(weight, str)]
    below = Ref(_total(b, op, f"{name}_weight", names, device)) if names else sum(numbers)
    above = _total(b, op, f"{name}_sum" if weights else name, sums, device, own=not weights)
    if weights:
        b.add(op, name, device, operator.truediv, (Ref(above), below))
    return (Part(name if weights else above, (), b.devices[above]),)


def _total(b: GraphRewriter, op: Op, stem: str, terms: Sequence[str], device: int, own: bool = False) -> str:
    """The sum of numbers."""
    if len(terms) == 1:
        return terms[0]
    stacked = b.glue(
        op, f"{op.name}_parts", device, torch.stack, ([Ref(term) for term in terms],), b.typed(terms[0], (len(terms),))
    )
    name = stem if own else b.free(stem)
    return b.add(op, name, device, torch.sum, (Ref(stacked),), type=b.typed(terms[0], ()))


def _unreduced(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    """A loss for each place."""
    classes = _classes(b, op)
    labels = op_name(op) in LABEL_LOSSES

    def call(region: Region, device: int) -> Called:
        scores = b.shape(arguments(op)["input"].name)
        read = (*region[:classes], (0, scores[classes]), *region[classes:]) if labels else region
        changed = _read(b, op, read, device) if labels else _read_pair(b, op, read, device)
        return op.target, (changed["input"], changed["target"]), _changed(op, changed)

    return each(b, op, places, call)


def _unreduced_cuts(b: GraphRewriter, op: Op) -> Iterable[int]:
    if _reduction(op) != "none":
        return ()
    return every(b, op) if op_name(op) in LABEL_LOSSES or _pair_cuts(b, op) else ()


def _pair_cuts(b: GraphRewriter, op: Op) -> Iterable[int]:
    """Any dimension of two operands of one shape."""
    given = arguments(op) if _reduction(op) in ("mean", "sum", "none", "batchmean") else {}
    if not given or given.get("weight") is not None:
        return ()
    shape = b.shape(given["input"].name)
    return range(len(shape)) if shape == b.shape(given["target"].name) else ()


def _read_pair(b: GraphRewriter, op: Op, region: Region, device: int) -> dict[str, Any]:
    given = arguments(op)
    return {key: b.read(op, given[key], region, device) for key in ("input", "target")}


def _paired(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    """A loss between two tensors of one shape, to a number: `places` are those of the first."""
    sums = []
    for name, place in zip(_names(b, op, places), places, strict=True):
        read = _read_pair(b, op, place.region, place.device)
        kwargs = _changed(op, {**read, "reduction": "sum"})
        sums.append(b.add(op, name, place.device, op.target, (read["input"], read["target"]), kwargs))
    shape = b.shape(arguments(op)["input"].name)
    over = {"mean": [float(prod(shape))], "batchmean": [float(shape[0])]}
    return _combined(b, op, sums, over.get(_reduction(op), []), places[0].device)


def _summed(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    """The sum or mean of all numbers of a tensor: `places` are those of the tensor."""
    x = argument(op, 0, "input").name
    dtype = {"dtype": op.kwargs["dtype"]} if "dtype" in op.kwargs else {}
    sums = [
        b.add(op, name, place.device, torch.sum, (Ref(b.gather(op, x, place.region, place.device)),), dtype)
        for name, place in zip(_names(b, op, places), places, strict=True)
    ]
    over = [float(prod(b.shape(x)))] if op_name(op) == "mean" else []
    return _combined(b, op, sums, over, places[0].device)


def _operand(b: GraphRewriter, op: Op) -> Iterable[int]:
    return range(len(b.shape(argument(op, 0, "input").name)))


UNREDUCED = dict.fromkeys(LOSSES, Rule(_unreduced, _unreduced_cuts))
TO_A_NUMBER = {
    **dict.fromkeys(LABEL_LOSSES, Rule(_labelled, _label_cuts)),
    **dict.fromkeys(PAIR_LOSSES, Rule(_paired, _pair_cuts)),
    **dict.fromkeys(("sum", "mean"), Rule(_summed, _operand)),
}

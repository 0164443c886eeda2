"""The sections on data and loss of a training script: made up from what the planned call takes and returns.

def batch(step: int) -> Any:
    random = torch.Generator().manual_seed(step)
    ids = torch.randint(128, (BATCH, 16), generator=random)
    return (ids,), ids


def loss_fn(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output[:, :-1].flatten(0, 1), target[:, 1:].flatten())
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fxpipe.codegen.text.line_layout import Brackets, Doc, layout, prefix
from fxpipe.codegen.text.object_text import literal, nest
from fxpipe.codegen.text.source_names import identifier, member, string
from fxpipe.errors import PlanError
from fxpipe.ir.graph.dtypes import DTYPES
from fxpipe.ir.graph.graph import Graph, Input, Ref, Struct, op_name
from fxpipe.ir.graph.op_arguments import argument
from fxpipe.ir.graph.value_types import Dim, TensorType, dim_size
from fxpipe.pipe.build.call_binding import match
from fxpipe.profiling.cast_types import FLOATS

OWN_NAMES = ("step", "target", "random", "BATCH")  # of `batch`


@dataclass(frozen=True)
class PlannedCall:
    """The call that was planned.

    - `inputs`: its arguments, a tuple or a dict.
    - `samples`: those of a step.
    - `sizes`: the numbers of symbolic sizes.
    - `floats`: the element type of floating-point inputs of a script; None: as they are in the graph.
    """

    graph: Graph
    inputs: Any
    samples: int
    sizes: Mapping[str, int]
    floats: str | None


@dataclass(frozen=True)
class MadeUp:
    """The lines of the sections, and how a step is called: `pipe.step({arguments})`."""

    batch: list[str]
    loss: list[str]
    arguments: str

    @property
    def has_target(self) -> bool:
        return bool(self.loss)


def made_up(call: PlannedCall) -> MadeUp:
    """Data and loss for a planned call. Raises PlanError if the model returns neither a loss nor a tensor with a row
    for each sample."""
    graph, names = call.graph, _variables(call.graph)
    lines = [line for item in graph.inputs if item.path for line in layout(_value(item, call, names), 1)]
    given: Any = tuple(graph.call[0]) if isinstance(call.inputs, tuple) else dict(graph.call[1])
    unpacked = "*inputs" if isinstance(call.inputs, tuple) else "**inputs"
    if _has_loss(graph):
        return MadeUp([*lines, *layout(prefix("return ", nest(given, names.__getitem__)), 1)], [], unpacked)
    target, loss = _target(call, names)
    if not isinstance(target, str):
        lines += layout(prefix("target = ", target), 1)
        target = "target"
    returned = Brackets("return ", (nest(given, names.__getitem__), target), "", "bare")
    return MadeUp([*lines, *layout(returned, 1)], loss, f"{unpacked}, target=target, loss_fn=loss_fn")


def _variables(graph: Graph) -> dict[str, str]:
    """A variable for each input; none of them hides a name of the script."""
    found = dict[str, str]()
    for item in graph.inputs:
        name = identifier(item.name)
        while name in OWN_NAMES or name in found.values():
            name += "_"
        found[item.name] = name
    return found


def _value(item: Input, call: PlannedCall, names: Mapping[str, str]) -> Doc:
    """`name = torch.randn(...)`."""
    head = f"{names[item.name]} = "
    if not isinstance(item.type, TensorType):
        found: dict[str, Any] = {}
        match(call.graph.call, (call.inputs, {}) if isinstance(call.inputs, tuple) else ((), call.inputs), found)
        return prefix(head, literal(found[item.name]))
    shape = _shape(item.type.shape, call)
    if item.type.dtype in FLOATS:
        return prefix(head, _normal(item.type.dtype, shape, call))
    kind = f"dtype=torch.{DTYPES[item.type.dtype].torch}"
    rows = _looked_up(call.graph, item.name)
    if rows is None:
        return prefix(head, Brackets("torch.ones(", (*shape, kind), ")"))
    sizes = Brackets("(", shape, ")", "literal")
    more = () if item.type.dtype == "i64" else (kind,)
    return prefix(head, Brackets("torch.randint(", (str(rows), sizes, "generator=random", *more), ")"))


def _normal(dtype: str, shape: tuple[Doc, ...], call: PlannedCall) -> Brackets:
    kind = call.floats or dtype
    more = () if kind == "f32" else (f"dtype=torch.{DTYPES[kind].torch}",)
    return Brackets("torch.randn(", (*(shape or ("()",)), "generator=random", *more), ")")


def _shape(shape: tuple[Dim, ...], call: PlannedCall) -> tuple[Doc, ...]:
    cut = {item.name: item.batch_dim for item in call.graph.inputs}
    rows = {size.name for size in call.graph.sizes if size.dim == cut[size.input]}
    sizes = {**call.sizes, **dict.fromkeys(rows, call.samples)}
    return tuple("BATCH" if dim in rows else str(dim_size(dim, sizes)) for dim in shape)


def _looked_up(graph: Graph, name: str) -> int | None:
    """How many rows the embedding has in which this input is looked up; None if in none."""
    for op in graph.ops:
        if op_name(op) == "embedding" and argument(op, 0, "input") == Ref(name):
            weight = argument(op, 1, "weight")
            kind = graph.types.get(weight.name) if isinstance(weight, Ref) else None
            if isinstance(kind, TensorType) and isinstance(kind.shape[0], int):
                return kind.shape[0]
    return None


# The loss -------------------------------------------------------------------------------------------------------------


def _has_loss(graph: Graph) -> bool:
    """Whether the model returns its loss: one number, or an object or dict with one called `loss`."""
    result = graph.result
    fields = dict(result.fields) if isinstance(result, Struct) else result if isinstance(result, Mapping) else {}
    found = fields.get("loss", result)
    kind = graph.types.get(found.name) if isinstance(found, Ref) else None
    return isinstance(kind, TensorType) and kind.dtype in FLOATS and not kind.shape


def _target(call: PlannedCall, names: Mapping[str, str]) -> tuple[Doc, list[str]]:
    """The target, which may be an input itself, and the body of the loss function."""
    text, scores = _scores(call.graph)
    for item in call.graph.inputs:
        rows = _looked_up(call.graph, item.name) if item.path else None
        ids = isinstance(item.type, TensorType) and (*item.type.shape, *scores.shape[2:]) == scores.shape
        if rows and ids and len(scores.shape) == 3 and isinstance(scores.shape[2], int) and scores.shape[2] >= rows:
            return names[item.name], [
                '"""How much each next token surprises the model."""',
                f"return F.cross_entropy({text}[:, :-1].flatten(0, 1), target[:, 1:].flatten())",
            ]
    target = _normal(scores.dtype, _shape(scores.shape, call), call)
    return target, ['"""MADE UP: how far the output is from random numbers."""', f"return F.mse_loss({text}, target)"]


def _scores(graph: Graph) -> tuple[str, TensorType]:
    """The first floating-point tensor with samples that the model returns, as an expression of its `output`."""
    cut = {output.value for output in graph.returned if output.batch_dim == 0}
    for text, ref in _parts("output", graph.result):
        kind = graph.types[ref.name]
        if ref.name in cut and isinstance(kind, TensorType) and kind.dtype in FLOATS:
            return text, kind
    raise PlanError(
        f"{graph.model} returns neither its loss nor a floating-point tensor with a row for each sample, so --launch "
        "can write no loss: let the model return one of them"
    )


def _parts(text: str, result: Any) -> Iterator[tuple[str, Ref]]:
    """The tensors of a result, each with its expression."""
    if isinstance(result, Ref):
        yield text, result
    elif isinstance(result, Struct):
        for name, part in result.fields:
            yield from _parts(member(text, name), part)
    elif isinstance(result, Mapping):
        for key, part in result.items():
            if isinstance(key, str):
                yield from _parts(f"{text}[{string(key)}]", part)
    elif isinstance(result, (tuple, list)):
        for at, part in enumerate(result):
            yield from _parts(f"{text}[{at}]", part)

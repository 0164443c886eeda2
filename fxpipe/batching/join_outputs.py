"""How the model's outputs are combined from the outputs of the micro-batches.

An output is refused if it cannot be combined and the user has not said how.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fxpipe.ir.graph.dead_code import without_dead_ops
from fxpipe.ir.graph.graph import Graph, Op, Output, is_opaque
from fxpipe.ir.graph.opaque_call import Opaque
from fxpipe.ir.graph.value_types import BATCH, ScalarType, TensorType, tensors

from .batch_dimension import follow
from .batch_facts import Flow, batch_dims, multiple
from .batch_reductions import SAME, Kind, kinds
from .data_sizes import unnamed_sizes
from .loss_parts import name_of, needed, unknown_parts
from .mixed_samples import Reduce, find_mixed, said
from .op_errors import DATA_SIZES, refuse, without_symbols

Sizes = Callable[[Mapping[str, int]], int]


def check_shapes(graph: Graph, values: Sequence[str]) -> None:
    """Raise CaptureError if a value that `values` or the model's states depend on has a shape that depends on values of
    tensors."""
    known = {size.name for size in graph.sizes} | {item.name for item in graph.inputs}
    needed = without_dead_ops(replace(graph, outputs=tuple(Output(value, None) for value in values)))
    for op in needed.ops:
        for kind in tensors(op.type):
            if unnamed_sizes(kind) - known:
                what = f"makes {without_symbols(kind)}, whose shape depends on the values of a tensor"
                raise refuse(op, what, DATA_SIZES[1])


def with_outputs(graph: Graph, values: Sequence[str], exact: Mapping[str, Sizes], reduce: Reduce) -> Graph:
    """The graph with an `Output` for each returned value, which says how those of the micro-batches are combined.
    `exact`: returned numbers, as functions of the sizes. Raises CaptureError if one cannot be combined."""
    flow, found = follow(graph), kinds(graph)
    by_name, parts = {op.name: op for op in graph.ops}, {name for name, _ in graph.parts}
    mixed = find_mixed(graph, flow, [value for value in values if value not in exact], reduce)

    def output(value: str) -> Output:
        if value in exact:
            return Output(value, None, _reduce_size(value, by_name.get(value), graph, exact[value]))
        is_sum = found[value].reduce is not None and parts & needed(graph, [value]) - {value}
        return joined(value, graph, flow, found, None if is_sum else said(graph, value, reduce))

    return replace(graph, outputs=tuple(map(output, values)), mixed=mixed)


def of_one(value: str, graph: Graph) -> Output:
    """A value of a batch of one micro-batch: with the dimension of its samples, if it has one."""
    dims = batch_dims(graph.types[value])
    return Output(value, dims[0], None) if dims else Output(value, None, "same")


def joined(value: str, graph: Graph, flow: Flow, found: Mapping[str, Kind], how: str | None) -> Output:
    """How a value of the batch is joined from those of the micro-batches; `how`: as the user says. Raises CaptureError
    if it cannot be."""
    op = flow.made.get(value)
    if batch_dims(flow.types[value]):
        return _samples(value, op, graph, flow)
    if found[value] == SAME and value not in flow.depends:
        return Output(value, None, "same")
    return Output(value, None, _pooled(value, op, graph, flow, found[value], how))


def _samples(value: str, op: Op | None, graph: Graph, flow: Flow) -> Output:
    """An output with a dimension for the batch: micro-batches are joined along it."""
    kind = flow.types[value]
    dim = batch_dims(kind)[0]
    if value in flow.counted:
        raise refuse(
            flow.counted[value],
            f"numbers the samples of the batch, and is returned as {value}, but each micro-batch counts from 0",
            "compute it from what the pipe returns, or pass the numbers as an input",
        )
    whole = isinstance(kind, TensorType) and multiple(kind.shape[dim]) is not None
    if (mixes := flow.mixes(value)) is not None and not whole:
        raise mixes
    if not whole or (flow.outer(value) > 1 and value != graph.loss):  # a loss is summed: order does not matter
        raise refuse(
            op,
            f"the output {value}, {kind}, has other things before the batch in one dimension, so that micro-batches "
            "cannot be joined",
            "return it with a dimension for the batch alone, and reshape what the pipe returns",
        )
    return Output(value, dim)


def _pooled(value: str, op: Op | None, graph: Graph, flow: Flow, kind: Kind, how: str | None) -> str:
    """How one value over the batch is combined from those of the micro-batches: "same", "mean" or "sum"."""
    if how in ("mean", "sum"):
        return how
    if kind.reduce is not None:
        return kind.reduce
    what, name = ("the loss", "loss") if value == graph.loss else (f"the output {value}", value)
    why = kind.why or "no sum or mean over its samples"
    blame = kind.blame or flow.pooled.get(value, op)
    if blame is not None and not blame.origin.line:  # one of several results of a submodule kept whole
        blame = next((one for one in graph.ops if one.name in blame.reads and is_opaque(one)), blame)
    advice = f"if each micro-batch may have one of its own, to be averaged, write reduce={{{name!r}: 'mean'}}"
    advice += " or reduce='mean'" * (value == graph.loss)
    if value == graph.loss:
        advice += "; for that of the whole batch, compute it of what the pipe returns: loss_fn(pipe(x), y).backward()"
    if (part := next(iter(unknown_parts(graph, value)), None)) is not None:
        advice += f"; for this part of it alone, reduce={{{name_of(part, graph)!r}: 'mean'}}"
    if blame is not None and is_opaque(blame) and not kind.why:
        why = "nothing tells whether it is a mean or a sum over its samples"
        advice = f"write reduce={{{name!r}: 'mean'}} or reduce={{{name!r}: 'sum'}}"
        if isinstance(blame.target, Opaque) and blame.target.advice:
            advice += f"; or, to have {blame.target} traced, {blame.target.advice}"
    raise refuse(blame, f"{what}, {flow.types[value]}, is one value over the batch, and {why}", advice)


def _reduce_size(value: str, op: Op | None, graph: Graph, compute: Sizes) -> str:
    """How a number made of sizes is combined: "same" if the batch size does not matter, "sum" if proportional."""
    names = {size.name for size in graph.sizes} | {i.name for i in graph.inputs if isinstance(i.type, ScalarType)}
    one, two, five = (compute({name: rows if name == BATCH else 7 for name in names}) for rows in (1, 2, 5))
    if one == two == five:
        return "same"
    if (two, five) == (2 * one, 5 * one):
        return "sum"
    raise refuse(
        op,
        f"the output {value} is a number that depends on the batch size, and each micro-batch has another",
        "return the tensor that has this size, and ask what the pipe returns for it",
    )

"""The warning about models that mix the samples of a batch.

    logits = text @ image.t()      f32[b, b]      mixes every sample with every other of its micro-batch

A micro-batch has only its own samples, so the pipe returns what the plain model returns for each micro-batch by itself,
which differs from the result for the whole batch. A warning says so once, unless the user has said that it is meant
(`reduce`); `pipe.explain()` always says it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fxpipe.errors import CaptureError, MixedSamplesWarning, warn
from fxpipe.ir.graph.graph import Graph, Mixed, Output
from fxpipe.ir.graph.value_types import BATCH, TensorType, dim_names, dim_size

from .batch_facts import Flow, Mixes, batch_dims
from .op_errors import at

Reduce = Mapping[str, str] | str | None
JOINED = "cat"  # what `reduce` calls outputs that are joined along the batch


def said(graph: Graph, value: str, reduce: Reduce) -> str | None:
    """The user's `reduce` for an output, or None. The loss of a step may be given as "loss"."""
    if isinstance(reduce, Mapping):
        return reduce.get(value) or (reduce.get("loss") if value == graph.loss else None)
    return None if reduce == JOINED and not batch_dims(graph.types[value]) else reduce


def called_by_user(value: str, graph: Graph) -> str:
    """The name that the user has for an output."""
    return "loss" if value == graph.loss else value


def why_mixed(value: str, flow: Flow) -> Mixes | None:
    """How the samples of a value were mixed, or None. Raises CaptureError if the value cannot be computed at all."""
    error = flow.mixes(value) or (flow.scaled.get(value) if batch_dims(flow.types[value]) else None)
    if error is not None and not isinstance(error, Mixes):
        raise error
    return error


def find_mixed(graph: Graph, flow: Flow, values: Sequence[str], reduce: Reduce) -> tuple[Mixed, ...]:
    """The ops that mix the samples of some of `values`."""
    found: dict[tuple[Mixes, bool], list[str]] = {}
    for value in values:
        why = why_mixed(value, flow)
        if why is not None:
            meant = reduce == JOINED or (isinstance(reduce, Mapping) and said(graph, value, reduce) is not None)
            found.setdefault((why, meant), []).append(value)
    return tuple(Mixed(why.op.origin, why.what, tuple(of), meant) for (why, meant), of in found.items())


def tell(graph: Graph, batch: int | None, sizes: Callable[[int], Sequence[int]], told: set[Mixed]) -> None:
    """Warn about lines that are not in `told` yet, if the batch is cut."""
    new = [mixed for mixed in graph.mixed if not mixed.meant and mixed not in told]
    rows = sizes(batch) if batch is not None else ()
    if new and batch is not None and len(rows) > 1:
        warn("\n\n".join(text(graph, mixed, batch, rows) for mixed in new), MixedSamplesWarning)
        told.update(new)


def refuse_unmeant(graph: Graph) -> None:
    """Raise CaptureError for a line that mixes samples, if the user has not said that it is meant."""
    for mixed in graph.mixed:
        if not mixed.meant:
            raise CaptureError(
                f"{at(mixed.origin)}{mixed.what}, and a micro-batch has its own samples only. If that is meant, write "
                f"reduce={_consent(graph, mixed)}, or reduce={JOINED!r} for whatever mixes samples"
            )


def text(graph: Graph, mixed: Mixed, batch: int, rows: Sequence[int]) -> str:
    """The text of a warning: the line, its effect on the outputs, and what to write."""
    results = "; ".join(_result(graph, output, batch, rows) for output in _outputs(graph, mixed))
    few = f"{rows[0]}" if rows[0] == rows[-1] else f"{rows[-1]} or {rows[0]}"
    return (
        f"{at(mixed.origin)}{mixed.what}; but a micro-batch has its own samples only, {few} of {batch}. What comes of "
        f"it is what the plain model makes of each micro-batch by itself: {results}.\n"
        "If you want that of the whole batch, write chunks=1; or let the model return what goes into this line, and "
        "compute the rest from what the pipe returns (not in the loss_fn of step(), which has micro-batches, too: call "
        "loss.backward()).\n"
        f"If this is meant, write reduce={_consent(graph, mixed)}, or reduce={JOINED!r} for whatever mixes samples."
    )


def _consent(graph: Graph, mixed: Mixed) -> dict[str, str | None]:
    """The value of `reduce` with which the user says that it is meant."""
    return {
        called_by_user(output.value, graph): JOINED if output.batch_dim is not None else output.reduce
        for output in _outputs(graph, mixed)
    }


def _outputs(graph: Graph, mixed: Mixed) -> list[Output]:
    return [output for output in graph.outputs if output.value in mixed.outputs]


def _result(graph: Graph, output: Output, batch: int, rows: Sequence[int]) -> str:
    """How one output differs from the model's."""
    name, kind = called_by_user(output.value, graph), graph.types[output.value]
    if output.batch_dim is None:
        return f"{name} is the {output.reduce} of {len(rows)} such values"
    if not isinstance(kind, TensorType) or len(batch_dims(kind)) < 2:
        return f"{name}, {kind}, joined"
    whole = [_size(size, batch) for size in kind.shape]
    block = [whole[dim] if dim == output.batch_dim else _size(size, rows[0]) for dim, size in enumerate(kind.shape)]
    return f"{name}, {kind}, joined: {whole} becomes {block}"


def _size(size: int | str, batch: int) -> int | str:
    return dim_size(size, {BATCH: batch}) if set(dim_names(size)) <= {BATCH} else size

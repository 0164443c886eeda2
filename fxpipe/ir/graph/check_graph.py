"""Whether a graph is well-formed."""

from __future__ import annotations

from typing import Any

from .graph import Graph, refs


def check(graph: Graph) -> None:
    """Raise ValueError, with the op and the user's line, if the graph is not well-formed: a name is defined twice or
    never, is used before it is defined, or is no identifier; or the loss or result is not made of outputs."""
    known: set[str] = set()
    given: tuple[Any, ...] = (*graph.inputs, *graph.sizes, *graph.states)
    for item in given:
        _define(item.name, known, "an input, size or state")
    for op in graph.ops:
        for name in (*op.reads, *op.writes):
            if name not in known:
                raise ValueError(f"op {op.name} uses {name!r} before it is defined, at {op.origin}")
        _define(op.name, known, f"op {op.name}, at {op.origin}")
    for output in graph.outputs:
        if output.value not in known:
            raise ValueError(f"the output {output.value!r} is not defined")
    if graph.epilogue is not None:
        check(graph.epilogue)
        if lost := graph.taken - {output.value for output in graph.outputs}:
            raise ValueError(f"the epilogue takes {sorted(lost)}, which are no outputs")
    results = {output.value for output in graph.returned}
    if graph.loss is not None and graph.loss not in results:
        raise ValueError(f"the loss {graph.loss!r} is not an output")
    if graph.totals is not None:
        check(graph.totals)
    for ref in refs(graph.result):
        if ref.name not in results:
            raise ValueError(f"the result uses {ref.name!r}, which is not an output")


def _define(name: str, known: set[str], where: str) -> None:
    if name in known:
        raise ValueError(f"{name!r} is defined twice, the second time by {where}")
    if not name.isidentifier():
        raise ValueError(f"{name!r} is not a name, in {where}")
    known.add(name)

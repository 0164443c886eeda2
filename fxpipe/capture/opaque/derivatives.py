"""Derivatives that a model takes inside of forward: what takes them is kept whole.

    energy = self.energy(x)                                              forces: autograd runs while forward runs
    (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    slope = torch.func.grad(self.potential)(x)                           the same, by ops of torch.func in the trace

The first forward of a stage that recomputes has no graph, which autograd needs here: such a stage runs it with
gradients, and drops the graph afterwards (`Stage.derives`). A derivative that goes back through what a submodule was
given is not the submodule's own: what is around it is kept whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge, Node
from torch.overrides import TorchFunctionMode

from fxpipe.capture.capture_errors import DERIVES, WRITTEN_OUT, Refused, line_of, modules_around

Edge = tuple[Node, int]


def derived(graph: fx.Graph) -> Refused | None:
    """The refusal of the first derivative of torch.func, or of forward mode, in a trace; None if there is none. Its
    modules are those around all ops of it, and of a vmap that it is in."""
    depth, span, derives = 0, list[fx.Node](), False
    for node in graph.nodes:
        called = getattr(node.target, "__name__", "")
        if called.endswith("_increment_nesting") or called == "_enter_dual_level":
            depth += 1
            derives |= called != "_vmap_increment_nesting"
        if depth:
            span.append(node)
        if called.endswith("_decrement_nesting") or called == "_exit_dual_level":
            depth -= 1
        if derives and not depth:
            break
        span = span if depth else []
    if not derives:
        return None
    paths = [path for node in span if (path := modules_around(node))]
    around = [level[0] for level in zip(*paths, strict=False) if len(set(level)) == 1]
    where = next((line for node in span if (line := line_of(node)) is not None), None)
    return Refused(where, DERIVES, WRITTEN_OUT, around)


class Derivatives(TorchFunctionMode):
    """While it is on, notes whether derivatives are taken (`taken`), and whether they go back through tensors
    that were given (`leave`)."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.given = _edges([*given])
        self.taken = self.leave = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.grad:
            self.taken = True
            named = dict(zip(("outputs", "inputs"), args, strict=False)) | (kwargs or {})
            self.leave |= leaves_through(self.given, _edges(named["outputs"]), _edges(named["inputs"]))
        elif func in (torch.autograd.backward, Tensor.backward) or getattr(func, "__name__", "") == "_make_dual":
            self.taken = True
        return func(*args, **(kwargs or {}))


def leaves_through(doors: set[Edge], outputs: Iterable[Edge], inputs: Iterable[Edge]) -> bool:
    """Whether a path in autograd's graph from `outputs` to `inputs` passes one of the edges `doors` and goes on."""
    reached = _reached(outputs, doors) & doors
    behind = [(node, at) for door, _ in reached for node, at in door.next_functions if node is not None]
    return not _reached(behind, set()).isdisjoint(inputs)


def depended_on(results: Iterable[Any], given: Iterable[Tensor]) -> tuple[bool, ...]:
    """For each given tensor whether autograd goes from a result back to it, and not by way of another one."""
    doors = [_edges(x) for x in given]
    reached = _reached(_edges([x for x in results if isinstance(x, Tensor)]), set[Edge]().union(*doors))
    return tuple(not edges.isdisjoint(reached) for edges in doors)


def _reached(starts: Iterable[Edge], doors: set[Edge]) -> set[Edge]:
    """All edges of autograd's graph that are reached from these, without going through the doors."""
    found, todo = set[Edge](), list(starts)
    while todo:
        edge = todo.pop()
        if edge not in found:
            found.add(edge)
            if edge not in doors:
                todo += [(node, at) for node, at in edge[0].next_functions if node is not None]
    return found


def _edges(given: Any) -> set[Edge]:
    """The edges to these tensors, or these edges. A tensor that a transform of torch.func has wrapped may have none."""
    found = set[Edge]()
    for one in [given] if isinstance(given, (Tensor, GradientEdge)) else given:
        if isinstance(one, GradientEdge):
            found.add((one.node, one.output_nr))
        elif one.requires_grad and one.grad_fn is not None:
            found.add((one.grad_fn, one.output_nr))
        elif one.requires_grad:
            with torch.enable_grad():
                view = one.view_as(one).grad_fn
            found.update((node, at) for node, at in (view.next_functions[:1] if view else ()) if node is not None)
    return found

"""The backward of a task in two halves, so that the half that nobody waits for can fill the bubble.

`torch.autograd.grad` can be asked for the takes first and for the parameters later, but the second call walks the whole
way again: a weight's gradient needs that of the activation behind it. Here what the first half has found is kept where
the two part, at the border:

    x ──▶ mm ──▶ relu ──▶ mm ──▶ y          each node reaches a take, or parameters only, or both; the border is
          ▲               ▲                 the nodes that reach a take and have an edge to one that does not
        w.t()           v.t()

    input_gradient   [1] walk the graph and find the border (both `mm`)
                     [2] run from the outputs to the takes, and keep the gradients that arrive at the border
    weight_gradient  [3] at each node of the border, compute the edges that are left, from what was kept
                     [4] run what reaches parameters only (both `.t()`), in one go

So each node runs once, or, on the border, each of its edges. In [3] no path is followed, and a parameter that is used
again further down is not counted twice. Autograd Functions written in Python have no halves: they run whole in [2].
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, Node

from .saved_tensors import Saved

Grads = tuple[Tensor | None, ...]
Root = tuple[Tensor | GradientEdge, Tensor]  # where to start, and the gradient there
Edge = tuple[int, GradientEdge]  # its place among the node's edges, and where it leads
Border = list[tuple[Node, list[Edge]]]
Users = dict[Node, list[Node]]  # the nodes with an edge to a node; where backward starts, the node itself too

PythonNode = torch._C._FunctionBase  # what Functions written in Python are in the graph
ENOUGH = 1 << 20  # bytes of gradients on their way to the parameters; then they are added up, to use the memory again


@dataclass(frozen=True)
class Weights:
    """What is left of a task's backward: `roots` that reach parameters only, and the `border`, with `kept[k]` what
    has arrived at border[k]. Nodes written in Python do not keep the graph alive; `owners` do."""

    roots: list[Root]
    border: Border
    kept: list[Grads]
    users: Users
    owners: list[Node | None]


def input_gradient(
    outputs: Sequence[Any], grads: Sequence[Tensor | None], leaves: Sequence[Tensor], saved: Saved | None = None
) -> tuple[Grads, Weights]:
    """The gradients of the leaves, None where there is none, and what is left for `weight_gradient`.

    `leaves` are the task's takes; all else that needs a gradient is a parameter. If forward ran under `saved`, what the
    second half has no use for is freed. Both halves run on the stream of forward. Nobody may write to `grads` before
    the second has run: they may be among what is kept.
    """
    wanted = {id(leaf): leaf for leaf in leaves if leaf.requires_grad}
    pairs = [(y, grad) for y, grad in zip(outputs, grads, strict=True) if grad is not None and y.requires_grad]
    if not wanted:
        return (None,) * len(leaves), Weights([*pairs], [], [], {}, [])
    users, reaching, border = walk([y.grad_fn for y, _ in pairs], wanted)
    first: list[Root] = []
    later: list[Root] = []
    for y, grad in pairs:
        (first if y.grad_fn in reaching or id(y) in wanted else later).append((y, grad))
    owners = [owner(y) for y, _ in pairs if isinstance(y.grad_fn, PythonNode)] if border else []
    weights = Weights(later, border, keep(border), users, owners)
    if not first:
        return (None,) * len(leaves), weights
    with nullcontext() if saved is None else saved.letting_go({node for node, _ in border}):
        found = run(first, tuple(wanted.values()), keep_graph=bool(border))
    by_leaf = dict(zip(wanted, found, strict=True))
    return tuple([by_leaf.get(id(leaf)) for leaf in leaves]), weights


def weight_gradient(weights: Weights) -> None:
    """Add the parameters' gradients to their `.grad`. It can be done once: then the graph is gone.

    As after any backward, a first gradient may share its memory with one that was passed on: see `unshare`.
    """
    if weights.border:
        cross(weights)
    if weights.roots:
        run(weights.roots)
    for part in (weights.roots, weights.border, weights.kept, weights.users, weights.owners):
        part.clear()


def walk(roots: Sequence[Node | None], leaves: Container[int]) -> tuple[Users, set[Node], Border]:
    """The users of all nodes, the nodes that reach a leaf (given by ids), and the border: step [1]."""
    stack = list({node: None for node in roots if node is not None})
    users: Users = {node: [node] for node in stack}
    edges = {}
    reaching: set[Node] = set()
    while stack:
        node = stack.pop()
        edges[node] = node.next_functions
        for child, _ in edges[node]:
            if child in users:
                users[child].append(node)
            elif child is not None:
                users[child] = [node]
                stack.append(child)
        if not edges[node] and id(getattr(node, "variable", None)) in leaves:
            reaching.add(node)
    stack.extend(reaching)
    while stack:
        for node in users[stack.pop()]:
            if node not in reaching:
                reaching.add(node)
                stack.append(node)
    border = []
    for node in edges:  # and not in the set: sums are to be the same in each run
        if node in reaching:
            left = [
                (k, GradientEdge(child, nr))
                for k, (child, nr) in enumerate(edges[node])
                if child is not None and child not in reaching
            ]
            if left:
                border.append((node, left))
    return users, reaching, border


def keep(border: Border) -> list[Grads]:
    """A list that will hold, once backward has been there, the gradients that have arrived at each node of the border;
    of a node written in Python, those that it gave."""
    kept: list[Grads] = [()] * len(border)
    for k, (node, _) in enumerate(border):
        if isinstance(node, PythonNode):
            node.register_hook(lambda given, arrived, k=k: kept.__setitem__(k, given))
        else:
            node.register_prehook(partial(kept.__setitem__, k))
    return kept


def cross(weights: Weights) -> None:
    """Add what lies behind the border to the roots, with its gradients: step [3].

    A node computes the gradients that the backward under way asks for. So this is a backward that asks for those behind
    the border, and leads through one node only, which calls the others by hand.
    """
    with torch.enable_grad():
        start = torch.zeros((), device="cpu", requires_grad=True)
        end = Cross.apply(start, weights)  # type: ignore[no-untyped-call]
    asked = [edge for _, left in weights.border for _, edge in left]
    run([(end, torch.ones((), device="cpu"))], (start, *asked))


class Cross(Function):
    @staticmethod
    def forward(ctx: Any, start: Tensor, weights: Weights) -> Tensor:
        ctx.weights = weights
        return start.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        weights: Weights = ctx.weights
        size = 0
        for k, (node, left) in enumerate(weights.border):
            given = weights.kept[k] if isinstance(node, PythonNode) else call(node, weights.kept[k])
            weights.kept[k] = ()
            for place, edge in left:
                found = given[place]
                if found is not None:
                    weights.roots.append((edge, found))
                    size += found.numel() * found.element_size()
            if size > ENOUGH:
                del given, found
                add_up(weights)
                size = 0
        return None, None


def call(node: Any, grads: Grads) -> tuple[Tensor | None, ...]:
    """The gradients at the node's edges; torch does not say in its types that nodes can be called."""
    given: Grads = node(*grads)
    return given


def add_up(weights: Weights) -> None:
    """Run [4] for the roots that no other node of the border has to do with."""
    roots = weights.roots.copy()
    weights.roots.clear()
    alone: list[Root] = []
    for root, grad in roots:
        ready = isinstance(root, GradientEdge) and single(root.node, weights.users)
        (alone if ready else weights.roots).append((root, grad))
    roots.clear()
    if alone:
        run(alone)


def single(node: Node, users: Users) -> bool:
    """Whether there is one way only to the node, and to all that it reaches."""
    return len(users[node]) == 1 and all(single(child, users) for child, _ in node.next_functions if child is not None)


def run(roots: list[Root], wanted: tuple[Tensor | GradientEdge, ...] = (), keep_graph: bool = False) -> Grads:
    """The gradients of what is wanted; if nothing is, all leaves' gradients are added to their `.grad`."""
    starts, grads = zip(*roots, strict=True)
    found: Grads = torch.autograd.Variable._execution_engine.run_backward(
        starts, grads, keep_graph, False, wanted, allow_unreachable=True, accumulate_grad=not wanted
    )
    return found


def owner(tensor: Tensor) -> Node | None:
    """A node that keeps the tensor's graph alive, and not its memory."""
    with torch.enable_grad():
        return tensor.view_as(tensor).grad_fn

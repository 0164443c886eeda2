"""The backward of a task in two halves, so that the half that no other stage waits for can fill the bubble.

`torch.autograd.grad` can compute the gradients of the takes first and of the parameters later, but the second call
repeats the whole way: a weight's gradient needs the gradient of the activation behind it. Here the gradients that the
first half finds are kept at the border, where the ways to takes and to parameters part:

    x ──▶ mm ──▶ relu ──▶ mm ──▶ y          each node reaches a take, or parameters only, or both; the border is
          ▲               ▲                 the nodes that reach a take and have an edge to one that does not
        w.t()           v.t()

    input_gradient   [1] walk the graph and find the border (both `mm`)
                     [2] run from the outputs to the takes, and keep the gradients that arrive at the border
    weight_gradient  [3] at each node of the border, compute the remaining edges from the kept gradients
                     [4] run the nodes that reach parameters only (both `.t()`), in one backward

So each node runs once; on the border, each of its edges is computed once. Step [3] follows no path, so a parameter that
is used again further down is not counted twice. Autograd Functions written in Python cannot be split: they run in [2].
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
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from fxpipe.torch_internals.autograd_engine import ENGINE, add_gradients, gradients

from .saved_tensors import Saved

Grads = tuple[Tensor | None, ...]
Root = tuple[Tensor | GradientEdge, Tensor]  # where to start, and the gradient there
Edge = tuple[int, GradientEdge]  # its index among the node's edges, and its target
Border = list[tuple[Node, list[Edge]]]
Users = dict[Node, list[Node]]  # the nodes with an edge to a node; where backward starts, the node itself too

PythonNode = BackwardCFunction  # the nodes of Functions written in Python
ENOUGH = 1 << 20  # bytes of gradients that have crossed the border, at which they are accumulated to reuse the memory


@dataclass(frozen=True)
class Weights:
    """The second half of a task's backward.

    - `roots`: where to start, at nodes that reach parameters only.
    - `border`: the nodes of the border with their remaining edges; `kept[k]`: the gradients at `border[k]`.
    - `users`: the users of each node, as `walk` finds them.
    - `owners`: nodes that keep the graph alive, which nodes written in Python do not.
    """

    roots: list[Root]
    border: Border
    kept: list[Grads]
    users: Users
    owners: list[Node | None]


def input_gradient(
    outputs: Sequence[Any], grads: Sequence[Tensor | None], leaves: Sequence[Tensor], saved: Saved | None = None
) -> tuple[Grads, Weights]:
    """The gradients of the leaves, None for a leaf without one, and the work left for `weight_gradient`.

    `leaves` are the task's takes; every other leaf is a parameter. If forward ran under `saved`, tensors that the
    second half does not need are freed. Both halves run on the stream of forward. `grads` must not be written before
    the second half has run, which may use them.
    """
    ENGINE.need("a schedule that splits backward")  # torch.autograd.grad refuses gradients that are to be summed
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
    """Add the parameters' gradients to their `.grad`. Can be called once: it frees the graph.

    As after any backward, a parameter's first gradient may share memory with another one: see `unshare`.
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
    for node in edges:  # a dict, not a set: in a fixed order sums are the same in each run
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
    """A list that backward will fill with the gradients that arrive at each node of the border, or, for a node written
    in Python, the gradients that it returns."""
    kept: list[Grads] = [()] * len(border)
    for k, (node, _) in enumerate(border):
        if isinstance(node, PythonNode):
            node.register_hook(lambda given, arrived, k=k: kept.__setitem__(k, given))
        else:
            node.register_prehook(partial(kept.__setitem__, k))
    return kept


def cross(weights: Weights) -> None:
    """Add the edges behind the border to the roots, with their gradients: step [3].

    A node only computes the gradients that the running backward asks for. So this runs a backward that asks for the
    gradients behind the border, through a single node, `Cross`, which calls the nodes of the border itself.
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
    """The gradients at the node's edges. Nodes can be called, but torch's type annotations do not say so."""
    given: Grads = node(*grads)
    return given


def add_up(weights: Weights) -> None:
    """Run [4] for the roots whose nodes no other way leads to."""
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
    """Whether there is only one way to the node, and to each node that it reaches."""
    return len(users[node]) == 1 and all(single(child, users) for child, _ in node.next_functions if child is not None)


def run(roots: list[Root], wanted: tuple[Tensor | GradientEdge, ...] = (), keep_graph: bool = False) -> Grads:
    """Run backward: the gradients of `wanted`. If that is empty, gradients are added to the `.grad` of all leaves."""
    starts, grads = zip(*roots, strict=True)
    if wanted:
        return gradients(starts, grads, wanted, keep_graph)
    add_gradients(starts, grads, keep_graph)
    return ()


def owner(tensor: Tensor) -> Node | None:
    """A node that keeps the tensor's graph alive, but not the tensor's memory."""
    with torch.enable_grad():
        return tensor.view_as(tensor).grad_fn

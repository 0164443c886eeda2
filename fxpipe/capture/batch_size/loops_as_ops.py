"""Loops over samples as ops that do for any number of samples what a loop (`sample_loops.py`) does with each. They are
in a vmap:

    enter a vmap of 2
    f = add_batch_dim(x, 0);  linear = linear(f, fc.weight);  relu = linear.relu()
    stack = remove_batch_dim(relu, 0)
    leave it

Where samples have numbers of their own, as in `[s[:n].mean(0) for s, n in zip(x, lengths.tolist())]`, they take the
values of all samples one after the other (`each_sample.py`).
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import fx

from fxpipe.capture.tracing.dynamo import Traced
from fxpipe.capture.tracing.effects.op_effects import Step, steps
from fxpipe.capture.tracing.rewriting.graph_view import LINES, own_values
from fxpipe.runtime.each_sample import each_sample, stacked

from .sample_loops import Env, Join, Loops, Sample, find_loops, op_name, sample_lines


def with_loops_as_ops(one: tuple[Traced, int], other: tuple[Traced, int]) -> tuple[Traced, Traced] | None:
    """Two traces, each with its number of samples, with ops of all samples in place of each loop over them; None if
    what takes single samples in both is no loop."""
    copies = [_Copy(traced, rows) for traced, rows in (one, other)]
    lines = frozenset.intersection(*(sample_lines(made.graph, made.env, made.rows) for made in copies))
    found = [find_loops(made.graph, made.env, made.ran, made.rows, lines) for made in copies] if lines else [None]
    if None in found:
        return None
    for made, loops in zip(copies, found, strict=True):
        assert loops is not None
        _Writer(made, loops).write()
    return copies[0].traced, copies[1].traced


class _Copy:
    """A trace with a graph of its own, in which every placeholder has its value, and what nothing needs is left out.
    `env`, `ran`: what its run shows."""

    def __init__(self, traced: Traced, rows: int) -> None:
        self.graph, self.rows = fx.Graph(), rows
        nodes: dict[fx.Node, fx.Node] = {}
        self.graph.output(self.graph.graph_copy(traced.module.graph, nodes))
        for node, new in nodes.items():
            new.meta = copy.copy(node.meta)
        _apart(self.graph)
        module = fx.GraphModule(traced.module, self.graph)
        module.meta = traced.module.meta
        own_values(module)
        self.graph = module.graph
        self.traced = replace(traced, module=module)
        self.env: Env
        self.env, ran = steps(self.traced)
        self.ran: Mapping[fx.Node, Step] = {step.node: step for step in ran}
        for node in reversed(list(self.graph.nodes)):  # torch's own checks of numbers that depend on data
            if node.op.startswith("call") and node not in self.env and not node.users:
                self.graph.erase_node(node)


def _apart(graph: fx.Graph) -> None:
    """Write `x[i, :n]` as `x[i][:n]` where n is a value: ops take whole samples then."""
    for node in graph.nodes:
        index = node.args[1] if op_name(node) == "getitem" and len(node.args) == 2 else None
        if isinstance(index, tuple) and len(index) > 1 and type(index[0]) is int and len(node.all_input_nodes) > 1:
            with graph.inserting_before(node):
                sample = graph.call_function(operator.getitem, (node.args[0], index[0]))
            sample.meta = {key: value for key, value in node.meta.items() if key in LINES}
            node.args, node.meta = (sample, index[1:]), dict(sample.meta)


@cache
def _vmap_ops() -> Mapping[str, Callable[..., Any]]:
    """The functions that torch.vmap is made of in a trace, by name, as a trace of one shows them."""
    found: dict[str, Callable[..., Any]] = {}

    def seen(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        found.update({node.target.__name__: node.target for node in module.graph.nodes if callable(node.target)})
        return module.forward

    torch.compile(torch.vmap(torch.neg), backend=seen, fullgraph=True, dynamic=False)(torch.zeros(2, 2))
    return found


@dataclass
class _Writer:
    """Writes ops of all samples into a graph. By a value of the first sample: `stacked`, what has left a vmap;
    `of_each`, the values of each sample."""

    made: _Copy
    loops: Loops
    stacked: dict[fx.Node, fx.Node] = field(default_factory=dict)
    of_each: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def write(self) -> None:
        """Put ops in the place of each loop, and what makes the same of their results in the place of each join."""
        graph = self.made.graph
        for index, before in enumerate(self.loops.before):
            with graph.inserting_before(before):
                if self.loops.numbers:
                    self._copy_body(index, self.of_each, self._of_each_sample)
                else:
                    self._vmap(index)
        for join in self.loops.joins:
            with graph.inserting_before(join.node):
                new = self._joined(join)
            join.node.replace_all_uses_with(new)
        self._erase()
        self.made.traced.module.recompile()

    def _vmap(self, index: int) -> None:
        body = self.loops.bodies[index]
        random = any(self.made.ran[node].random for node in body)
        self._vmap_op("lazy_load_decompositions", (), body[0])
        self._vmap_op("_vmap_increment_nesting", (self.made.rows, "different" if random else "error"), body[0])
        inside: dict[fx.Node, fx.Node] = {}
        self._copy_body(index, inside, self._entered)
        for node in body:
            if any(self.loops.place.get(user, (-1,))[0] != index for user in node.users):
                self.stacked[node] = self._vmap_op("_remove_batch_dim", (inside[node], 1, self.made.rows, 0), node)
        self._vmap_op("_vmap_decrement_nesting", (), body[-1])

    def _copy_body(self, index: int, inside: dict[fx.Node, fx.Node], entered: Callable[[fx.Node], fx.Node]) -> None:
        """The ops of a loop, which are added to `inside`; `entered` makes what they read of samples and other loops."""

        def value(node: fx.Node) -> fx.Node:
            if node not in inside and (node in self.loops.samples or node in self.loops.place):
                inside[node] = entered(node)
            return inside.get(node, node)

        for node in self.loops.bodies[index]:
            args, kwargs = fx.map_arg((node.args, node.kwargs), value)
            inside[node] = self._of(node, self.made.graph.create_node(node.op, node.target, args, kwargs, node.name))

    def _of_each_sample(self, node: fx.Node) -> fx.Node:
        """What an op that takes samples takes, as values of each."""
        sample = self.loops.samples[node]
        made = self.made.graph.call_function(each_sample, (sample.whole, sample.dim))
        return self._sample(node, sample, self._of(node, made))

    def _entered(self, node: fx.Node) -> fx.Node:
        """A value of a sample, in a vmap: of one that takes samples, or of an earlier loop."""
        sample = self.loops.samples.get(node)
        if sample is None:
            return self._vmap_op("_add_batch_dim", (self.stacked[node], 0, 1), node)
        return self._sample(node, sample, self._vmap_op("_add_batch_dim", (sample.whole, sample.dim, 1), node))

    def _sample(self, node: fx.Node, sample: Sample, made: fx.Node) -> fx.Node:
        """What a node takes, of the samples that are `made`."""
        if sample.kept:
            made = self._of(node, self.made.graph.call_method("unsqueeze", (made, sample.dim)))
        if sample.rest:
            made = self._of(node, self.made.graph.call_function(operator.getitem, (made, sample.rest)))
        return made

    def _joined(self, join: Join) -> fx.Node:
        """What a join makes, of the stacked values of all samples. It is a copy: it may be written."""
        graph, first = self.made.graph, join.parts[0]
        is_copy = first in self.of_each
        whole = self.stacked.get(first)
        if is_copy:
            whole = self._of(join.node, graph.call_function(stacked, (self.of_each[first],)))
        elif whole is None and first not in self.loops.samples:  # the same for all
            whole = self._of(join.node, graph.call_method("unsqueeze", (first, 0)))
            sizes = (self.made.rows, *(-1 for _ in self.made.env[first].shape))
            whole = self._of(join.node, graph.call_method("expand", (whole, *sizes)))
        elif whole is None:  # nothing is done with the samples
            sample = self.loops.samples[first]
            whole = sample.whole
            if sample.dim:
                whole = self._of(join.node, graph.call_method("movedim", (whole, sample.dim, 0)))
            if sample.kept:
                whole = self._of(join.node, graph.call_method("unsqueeze", (whole, sample.dim + 1)))
            if sample.rest:
                whole = self._of(join.node, graph.call_function(operator.getitem, (whole, (slice(None), *sample.rest))))
        if join.how == "sum":
            whole = self._of(join.node, graph.call_method("sum", (whole, 0)))
            plain = not isinstance(join.start, fx.Node) and join.start == 0
            return whole if plain else self._of(join.node, graph.call_function(operator.add, (join.start, whole)))
        if join.dim:
            whole = self._of(join.node, graph.call_method("movedim", (whole, 0, join.dim)))
        if join.how == "cat":
            whole = self._of(join.node, graph.call_method("flatten", (whole, join.dim, join.dim + 1)))
        return whole if is_copy else self._of(join.node, graph.call_method("clone", (whole,)))

    def _vmap_op(self, name: str, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
        return self._of(like, self.made.graph.call_function(_vmap_ops()[name], args))

    @staticmethod
    def _of(like: fx.Node, node: fx.Node) -> fx.Node:
        """The node, with the user's line of another one."""
        node.meta = {key: value for key, value in like.meta.items() if key in LINES}
        return node

    def _erase(self) -> None:
        """Take out the ops of the loops, and what was made for them alone."""
        joins = (node for join in self.loops.joins for node in (join.node, *join.chain))
        old = {*self.loops.samples, *self.loops.place, *joins}
        for node in reversed(list(self.made.graph.nodes)):
            step = self.made.ran.get(node)
            if node in old and not node.users and step is not None:
                old.update(read for read in node.all_input_nodes if read.op not in ("placeholder", "get_attr"))
                self.made.graph.erase_node(node)

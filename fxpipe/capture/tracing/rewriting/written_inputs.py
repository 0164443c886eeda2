"""Arguments that forward writes into in place, as a static cache is filled.

Every stage and micro-batch has its own copy of an argument, or of its part. So forward writes a copy, which is one more
output; after the run its values are copied into the user's tensor.

    def forward(keys, ...)                  def forward(keys, ...)
                                                keys_1 = clone(keys)
        keys.index_copy_(2, at, new)            keys_1.index_copy_(2, at, new)
        return attend(keys)                     return attend(keys_1), keys_1
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpipe.capture.call_arguments import Call
from fxpipe.capture.tracing.dynamo import Traced
from fxpipe.capture.tracing.effects.observed_writes import memory
from fxpipe.ir.graph.graph import Graph


@dataclass(frozen=True)
class WrittenInputs:
    """The paths of the arguments that are written; their final values are the last outputs of the trace."""

    paths: tuple[str, ...] = ()

    def original_outputs(self, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The outputs of the trace as Dynamo made it, without the final values of the written arguments."""
        return outputs[: len(outputs) - len(self.paths)]

    def final_values(self, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The final values of the written arguments, which are the last outputs."""
        return outputs[len(outputs) - len(self.paths) :]

    def with_clones(self, graph: Graph, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs of a graph, with copies of those that the call changes while autograd may still need them."""
        if not self.paths or not torch.is_grad_enabled():
            return inputs
        paths = (item.path for item in graph.inputs if item.path)
        return tuple(x.clone() if path in self.paths else x for path, x in zip(paths, inputs, strict=True))

    def copy_back(self, outputs: tuple[Any, ...], names: tuple[str, ...], call: Call) -> tuple[Any, ...]:
        """Copy the final values into the user's tensors; returns the other outputs, in which these tensors stand for
        the values copied into them. `names`: of the values of all outputs."""
        if not self.paths:
            return outputs
        reals, given = {leaf.path: leaf.real for leaf in call.leaves.values()}, {}
        for path, name, value in zip(self.paths, self.final_values(names), self.final_values(outputs), strict=True):
            if not reals[path].is_meta:  # else another rank has it
                reals[path].copy_(value)
                given[name] = reals[path]
        return self.original_outputs(tuple(given.get(name, value) for name, value in zip(names, outputs, strict=True)))


NO_WRITES = WrittenInputs()


def why_not_writable(call: Call, path: str) -> str:
    """Why an argument cannot be written, in words; "" if it can."""
    reals = {leaf.path: leaf.real for leaf in call.leaves.values()}
    real = reals[path]
    if real.requires_grad:
        return "requires a gradient"
    if real.layout is not torch.strided:
        return "is sparse"
    shared = next((name for name, x in reals.items() if x is not real and {*memory(x)} & {*memory(real)}), None)
    return "" if shared is None else f"shares its memory with {shared}"


def with_copies(traced: Traced, written: Collection[tuple[str, fx.Node, fx.Node]]) -> WrittenInputs:
    """Let forward write copies of these arguments: of each its path, its placeholder, and the op that writes it."""
    graph = traced.module.graph
    first = next(node for node in graph.nodes if node.op != "placeholder")
    results = next(node for node in graph.nodes if node.op == "output")
    copies = []
    for _, given, writer in written:
        with graph.inserting_before(first):
            copy = graph.call_function(torch.clone, (given,))
        copy.meta = {key: value for key, value in writer.meta.items() if key != "example_value"}
        for user in [user for user in given.users if user is not copy]:
            user.replace_input_with(given, copy)
        copies.append(copy)
    results.args = ((*results.args[0], *copies),)
    return WrittenInputs(tuple(path for path, _, _ in written))

"""Ops that read the number of a tensor: `x.view(height, width)`, `x.split([first, second])` and `torch.zeros(count)`.

Torch asks the tensor for its item inside of the op, where Dynamo does not see it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.ir.graph.graph import map_leaves
from fxpipe.torch_internals.op_modes import TorchDispatchMode
from fxpipe.torch_internals.tracing.tensors_without_memory import unset_fake_temporarily

ValueOf = Callable[..., Tensor | None]  # (node of a tensor, whether only its truth is asked, node of the op that asks)


class NumberAsked(Exception):
    """An op has read the number of a tensor."""


class NumbersAsked(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode around a run of a node of Dynamo's: it ends the run where the op reads the number of an argument.

    - `tensors`: the arguments that have a number, and their nodes.
    - `asked`: whether it has ended the run; then `answered` gives the arguments of the next one, which it does not end.
    """

    def __init__(self, node: fx.Node) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        reads = node.all_input_nodes if node.target not in ("item", "tolist") else ()
        self.node, self.asked = node, False
        self.tensors = {read.meta["example_value"]: read for read in reads if _is_number(read)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = torch.Tag.data_dependent_output in func.tags and len(args) == 1
        if not self.asked and reads and args[0] in self.tensors:
            self.asked = True
            raise NumberAsked
        return func(*args, **(kwargs or {}))

    def answered(self, args: Any, kwargs: Any, value_of: ValueOf) -> tuple[Any, Any]:
        """The arguments, and those of the node from now on: numbers in place of tensors that `value_of` knows."""
        with unset_fake_temporarily():
            values = {tensor: value_of(node, asking=self.node) for tensor, node in self.tensors.items()}
            known = {tensor: value.item() for tensor, value in values.items() if value is not None}
        known |= {self.tensors[tensor]: number for tensor, number in known.items()}
        self.tensors, self.asked = {}, False

        def answer(leaf: Any) -> Any:
            return known.get(leaf, leaf) if isinstance(leaf, (Tensor, fx.Node)) else leaf

        self.node.args, self.node.kwargs = map_leaves((self.node.args, self.node.kwargs), answer)
        args, kwargs = map_leaves((args, kwargs), answer)
        return args, kwargs


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, Tensor) and value.dim() == 0 and not value.is_floating_point()

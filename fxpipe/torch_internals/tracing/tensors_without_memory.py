"""Tensors with shapes, types and layouts, and no memory, whose sizes may be symbols."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch._dispatch import python as dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from fxpipe.torch_internals.capability import Capability

FAKE_TENSORS = Capability(
    what="tensors without memory",
    names=(
        "torch._dispatch.python.enable_python_dispatcher",
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "torch._subclasses.fake_tensor.unset_fake_temporarily",
    ),
    since="1.13",
    without="fxpipe does not start: torch.compile's own tracing stands on them, so every version has them",
    needed=True,
)
SYMBOLIC_SIZES = Capability(
    what="symbols as sizes of tensors without memory",
    names=(
        "torch._dynamo.maybe_mark_dynamic",
        "torch._dynamo.source.ConstantSource",
        "torch.fx.experimental.symbolic_shapes.DimDynamic",
        "torch.fx.experimental.symbolic_shapes.ShapeEnv",
    ),
    since="2.1",
    without='autograd computes all gradients, and backward="code" is refused',
)

__all__ = [
    "FakeTensor", "FakeTensorMode", "Symbols", "let_vary", "own_kernels", "python_kernels", "unset_fake_temporarily",
]  # fmt: skip


def python_kernels() -> AbstractContextManager[Any]:
    """A context in which ops run by their kernels in Python, since some of the others know no symbols."""
    return dispatcher.enable_python_dispatcher()


def own_kernels() -> AbstractContextManager[Any]:
    """A context in which ops run by their own kernels, also inside of `python_kernels`."""
    return dispatcher.no_python_dispatcher()


def let_vary(tensor: Tensor, dim: int) -> None:
    """Let this size of the tensor be a symbol in the next trace, unless forward asks for a number."""
    from torch._dynamo import maybe_mark_dynamic

    maybe_mark_dynamic(tensor, dim)


LARGEST = 1 << 24  # a size is at most this in a trace, so that torch knows that `x[:]` is x, as in a run


class Symbols:
    """Symbols for sizes, and a mode `fake` in which tensors have such sizes. Raises FxpipeError."""

    def __init__(self, cached: bool) -> None:
        SYMBOLIC_SIZES.need('backward="code"')
        from torch.fx.experimental import symbolic_shapes

        self.env = symbolic_shapes.ShapeEnv(specialize_zero_one=False, duck_shape=False)
        self.fake = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self.fake.cache_enabled = cached

    def size(self, name: str, value: int) -> tuple[Any, Any]:
        """A symbol, and a size that is this symbol, with this value while tracing."""
        from torch._dynamo import source
        from torch.fx.experimental import symbolic_shapes

        own = source.ConstantSource(name)
        symbol = self.env.create_symbol(
            value, own, dynamic_dim=symbolic_shapes.DimDynamic.DYNAMIC, constraint_dim=None, positive=True,
            do_not_specialize_zero_one=True,
        )  # fmt: skip
        self.env.constrain_symbol_range(symbol, 0, LARGEST)
        return symbol, self.env.create_symintnode(symbol, hint=value, source=own)

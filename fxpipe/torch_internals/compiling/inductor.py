"""Inductor: the functions that it makes, and how it makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import fx

from fxpipe.torch_internals.capability import Capability

INDUCTOR = Capability(
    what="the functions that Inductor makes of graphs",
    names=("torch._inductor.compile_fx.compile_fx_inner", "torch._inductor.lowering.fallbacks"),
    since="2.4",
    without="compiled stages are called through torch.compile's own checks, which takes longer",
)


def compile_fx(graph: fx.GraphModule, examples: Sequence[Any], inner: Callable[..., Any] | None = None) -> Any:
    """Inductor, as a backend of torch.compile. `inner` makes the functions of forward and of backward."""
    import torch._inductor.compile_fx as compiler  # late: it takes a second

    return compiler.compile_fx(graph, examples, **({} if inner is None else {"inner_compile": inner}))  # type: ignore


def compile_inner(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """What Inductor makes of one graph; its `current_callable` is the function that runs."""
    import torch._inductor.compile_fx as compiler

    return compiler.compile_fx_inner(graph, inputs, **options)


def checks_of_sizes(on: bool) -> AbstractContextManager[None]:
    """A context in which Inductor's functions check sizes, if they do otherwise, or do not."""
    import torch._inductor.config as config

    made: AbstractContextManager[None] = config.patch(size_asserts=config.size_asserts and on)
    return made


def is_fallback(operator: Any) -> bool:
    """Whether Inductor calls torch's own kernel for the operator."""
    from torch._inductor.lowering import fallbacks

    return operator in fallbacks


def records_graphs() -> bool:
    """Whether Inductor is set to make device graphs of its own."""
    import torch._inductor.config as config

    return bool(config.triton.cudagraphs)


def autograd_backend(compile: Callable[..., Any]) -> Callable[..., Any]:
    """A backend of torch.compile that makes the functions of forward and of backward by `compile`."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    made: Callable[..., Any] = aot_autograd(
        fw_compiler=compile, bw_compiler=compile, partition_fn=min_cut_rematerialization_partition
    )
    return made


def takes_a_list(function: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], Sequence[Any]]:
    """The function, marked as one that takes a list of arguments, which it may empty."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function

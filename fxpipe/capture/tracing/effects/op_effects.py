"""Runs a traced graph again on its fake tensors, to find what Dynamo does not tell: which memory each op writes, and
whether it draws random numbers.

Names such as `add_` are not enough: `F.relu(x, inplace=True)`, `x[i] = v`, `torch.add(a, b, out=x)` and `batch_norm` in
training write too. So the primitive ops that reach torch's dispatcher are observed: each declares what it writes and
whether it is random, and fake tensors know which of them share memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.capture.capture_errors import line_of, modules_around, refusal
from fxpipe.capture.tracing.dynamo import Traced
from fxpipe.capture.tracing.layers.layer_values import Known, LayerValues, memory_numbers
from fxpipe.ir.graph.graph import Region
from fxpipe.ir.graph.legal_cuts import ENTER_VMAP, LEAVE_VMAP
from fxpipe.ir.graph.ops import RECURRENT
from fxpipe.torch_internals.compiling.compiled_code import one_at_a_time
from fxpipe.torch_internals.compiling.dynamic_sizes import unknown_size
from fxpipe.torch_internals.grad_mode import gradient_setter
from fxpipe.torch_internals.operator_classes import HigherOrderOperator, OpOverload
from fxpipe.torch_internals.tracing.composite_ops import composed_in_python, one_step
from fxpipe.torch_internals.tracing.tensors_without_memory import FakeTensor, python_kernels
from fxpipe.torch_internals.tracing.trace_context import in_a_trace, say_where

from .observed_writes import Effects, as_fake
from .recorded_runs import Ran, recorded

# What `x.data = y` is in a graph: from torch 2.14 on it is the second.
SET_DATA = {torch.Tensor.set_, getattr(torch.ops.aten, "shallow_copy_data_", None)}
set_grad = gradient_setter()
ENTER_GRAD = {set_grad}
REGION_NAMES = {"_enter_autocast", "_exit_autocast", "_enter_inference_mode", "_exit_inference_mode"}
REGION_NAMES |= {"enter_cudnn_flags", "exit_cudnn_flags"}
ASSERTIONS = {"_assert_scalar", "_assert_async", "sym_constrain_range", "sym_constrain_range_for_size", "_check"}


Observed = tuple[Any, tuple[int, ...], bool]


@dataclass(frozen=True)
class Step:
    """What the run of one op of the traced graph showed."""

    node: fx.Node
    written: tuple[int, ...]
    random: bool
    regions: tuple[Region, ...]


def steps(traced: Traced) -> tuple[dict[fx.Node, Any], list[Step]]:
    """The values of all nodes, and a step for each op; contexts that ops enter and exit are on the ops inside. No op
    runs of which Dynamo's run is known (`recorded_runs.py`), or the run in a layer (`layer_values.py`)."""
    env: dict[fx.Node, Any] = {}
    found: list[Step] = []
    regions: list[tuple[fx.Node | None, Region]] = []
    dead = _dead_numbers(traced.module.graph)
    taken, in_layer = set[Ran](), _in_layer(traced)
    grad = torch.is_grad_enabled()
    # What replaces functions of torch's does so for the whole process, so no other thread may capture meanwhile.
    with one_at_a_time(), ExitStack() as contexts:
        contexts.enter_context(torch.inference_mode(False))
        contexts.enter_context(torch.set_grad_enabled(grad and not torch.is_inference_mode_enabled()))
        contexts.enter_context(traced.mode)
        contexts.enter_context(python_kernels())  # as Dynamo does: in C++, an LSTM uses the batch size as an int
        contexts.enter_context(one_step())
        contexts.enter_context(composed_in_python())
        contexts.enter_context(in_a_trace(traced.mode))
        effects = contexts.enter_context(Effects())
        contexts.enter_context(_left_vmaps(found))
        ambient = torch.is_grad_enabled()
        for node in traced.module.graph.nodes:
            if node.op == "placeholder":
                env[node] = _given(node, env, bool(in_layer))
            elif node.op == "get_attr":
                value = _attribute(traced.module, node.target)
                env[node] = traced.mode.from_tensor(value, static_shapes=True) if _is_real(value) else value
            elif node.op == "output":
                env[node] = fx.map_arg(node.args[0], env.__getitem__)
            elif _name(node) in REGION_NAMES or node.target in ENTER_GRAD:
                _region(node, env, regions, ambient)
            elif _changes_nothing(node, env):
                env[node] = env[node.args[0]]
                node.replace_all_uses_with(node.args[0])
            elif _name(node) not in ASSERTIONS and node not in dead:
                inside = tuple(region for _, region in regions)
                if node in in_layer:
                    env[node], written, random = _of_layer(env, *in_layer[node])
                else:
                    env[node], written, random = _of_run(node, env, effects, taken)
                found.append(Step(node, written, random or _drops(node), inside))
    return env, found


@contextmanager
def _left_vmaps(found: list[Step]) -> Iterator[None]:
    """A context in which an error leaves the vmaps that the ops found so far have entered: else the thread's next ops
    would run in them."""
    try:
        yield
    except BaseException:
        names = [_name(step.node) for step in found]
        entered = names.count(ENTER_VMAP) - names.count(LEAVE_VMAP)
        graph = found[-1].node.graph if found else fx.Graph()
        leave: Any = next((node.target for node in graph.nodes if _name(node) == LEAVE_VMAP), None)
        for _ in range(entered):
            leave()
        raise


def _in_layer(traced: Traced) -> dict[fx.Node, tuple[LayerValues, fx.Node]]:
    """The ops of layers: the values of the layer, and the node of its own graph."""
    if traced.placed is None or traced.placed.module is not traced.module:
        return {}
    values = {id(layer): LayerValues(layer) for layer, _ in traced.placed.layer_of.values()}
    return {node: (values[id(layer)], inner) for node, (layer, inner) in traced.placed.layer_of.items()}


def _given(node: fx.Node, env: dict[fx.Node, Any], known: bool) -> Any:
    """The value of a placeholder; that of a copied layer's tensor is `known` from the first layer's."""
    if "alike" not in node.meta:
        return _sized(node.meta["example_value"])
    first, make = node.meta["alike"]
    return Known(env[first], next(memory_numbers)) if known else _sized(make())


def _sized(value: Any) -> Any:
    """The value. A hollow tensor's memory gets the size that torch gives it in the first op that makes a view, so that
    it is the same before and after."""
    if type(value) is FakeTensor and value.layout == torch.strided and value.untyped_storage().nbytes() == 0:
        shape, stride, offset = value.shape, value.stride(), int(value.storage_offset())
        if all(type(number) is int for number in (*shape, *stride)):
            last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
            length = 0 if 0 in shape else offset + last + 1
            value.untyped_storage().resize_(length * value.element_size())
    return value


def _of_layer(env: dict[fx.Node, Any], values: LayerValues, inner: fx.Node) -> Observed:
    """What an op of a layer makes, as in the run of the layer's graph; the memory that it writes; whether it is
    random."""
    if not values.here:
        values.begin(env)
    return values.value(inner), values.written(inner), inner in values.layer.run.random


def _of_run(node: fx.Node, env: dict[fx.Node, Any], effects: Effects, taken: set[Ran]) -> Observed:
    """The same of another op: what its run shows, Dynamo's if that is known and not `taken` yet."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
    ran = recorded(node, args, kwargs)
    if ran is not None and ran not in taken:
        taken.add(ran)
        return ran.value, ran.written, ran.random
    _say_where(node)
    return effects.of(lambda: _run(node, args, kwargs))


def _drops(node: fx.Node) -> bool:
    """Whether this is a recurrent network with dropout between its layers. Its arguments are (input, state, parameters,
    biases, layers, dropout, train, ...), with the sizes of the steps after the input if that is a packed sequence."""
    if getattr(node.target, "__name__", "") not in RECURRENT or len(node.args) < 9:
        return False
    packed = isinstance(node.args[3], (list, tuple))
    layers, dropout, train = node.args[4 + packed : 7 + packed]
    return bool(train and dropout and layers != 1)


def _say_where(node: fx.Node) -> None:
    """Let the next guards have the user's line of the node."""
    if (frame := line_of(node)) is not None:
        say_where(frame.file, frame.line)


def _dead_numbers(graph: fx.Graph) -> set[fx.Node]:
    """The ops that compute Python numbers or truths that nothing needs: what is left of checks in the model."""
    numbers = (bool, int, float, torch.SymBool, torch.SymInt, torch.SymFloat)
    dead: set[fx.Node] = set()
    for node in reversed(graph.nodes):  # users first
        unused = isinstance(node.meta.get("example_value"), numbers) and dead.issuperset(node.users)
        if unused and _name(node) not in (ENTER_VMAP, LEAVE_VMAP):  # whose number is the depth
            dead.add(node)
    return dead


def _changes_nothing(node: fx.Node, env: dict[fx.Node, Any]) -> bool:
    """Whether this is `x.data = x`, as in `layer.to(dtype)` of a layer that has this dtype, or what Dynamo puts after
    that: parameters may stay what they are."""
    if _name(node) == "_lower_version_count_by_1":
        return node.args[0].target not in SET_DATA  # type: ignore[union-attr]
    if node.target not in SET_DATA or len(node.args) != 2:
        return False
    one, other = (env[item] for item in node.all_input_nodes[:1] + node.all_input_nodes[-1:])
    return one is other


def _run(node: fx.Node, args: Any, kwargs: Any) -> Any:
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if isinstance(node.target, HigherOrderOperator) and "example_value" in node.meta:
        return node.meta["example_value"]
    assert callable(node.target)
    try:
        return as_fake(node.target(*args, **kwargs))
    except unknown_size() as error:  # Dynamo took the value that a tensor had before forward wrote to it
        raise refusal(error, modules_around(node), line_of(node)) from None


def _region(node: fx.Node, env: dict[fx.Node, Any], open: list[tuple[fx.Node | None, Region]], ambient: bool) -> None:
    """Record a context that opens or closes at this node, and do the same to torch."""
    name = _name(node)
    if node.target in ENTER_GRAD:
        enabled = bool(node.args[0])
        open[:] = [(key, region) for key, region in open if key is not None or region.kind != "grad"]
        if enabled != ambient:
            open.append((None, Region("grad", (enabled,))))
        set_grad(enabled)
    elif name == "_enter_autocast":
        device, dtype, on, cache = (*node.args, None, None, None)[:4]
        open.append((node, Region("autocast", (device, dtype, True if on is None else on, cache))))
        env[node] = node.target(*node.args)  # type: ignore[operator]
    elif name == "_exit_autocast":
        open[:] = [(key, region) for key, region in open if key is not node.args[0]]
        node.target(env[node.args[0]])  # type: ignore[operator, index]
    elif name == "_enter_inference_mode":
        env[node] = torch.is_grad_enabled()
        enabled = not node.args[0] and torch.is_grad_enabled()
        open.append((node, Region("grad", (enabled,))))
        set_grad(enabled)
    elif name == "enter_cudnn_flags":
        open.append((node, Region("cudnn", node.args)))
    elif name == "exit_cudnn_flags":
        open.remove([each for each in open if each[1].kind == "cudnn"][-1])
    else:
        open[:] = [(key, region) for key, region in open if key is not node.args[0]]
        set_grad(env[node.args[0]])  # type: ignore[index]


def _name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, OpOverload):
        return str(target._opname)
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def _is_real(value: Any) -> bool:
    """Whether this is a tensor with values, which a transform has added."""
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor)


def _attribute(module: Any, path: Any) -> Any:
    for name in str(path).split("."):
        module = getattr(module, name)
    return module

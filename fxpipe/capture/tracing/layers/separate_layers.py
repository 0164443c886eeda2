"""The repeated layers of a model that are traced separately, equal ones once.

    x = self.h[0](x)       one op in the trace of the model, `layer`; meanwhile the layer is traced alone
    x = self.h[1](x)       one op; what was traced for the first layer is right for this one too, as its guards say

What the op makes is known from the layer's graph, which `place_layers.py` puts in its place afterwards. What cannot be
traced alone is traced with the model (`NotSeparate`): the model's trace begins again, with this layer in it.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list

from fxpipe.capture.tracing.effects.observed_writes import tensors_in
from fxpipe.capture.twins.twin import GLOBAL_HOOKS, Twins
from fxpipe.torch_internals.op_modes import without_modes
from fxpipe.torch_internals.tracing.context_variables import Contexts
from fxpipe.torch_internals.tracing.python_effects import PythonEffects, changed
from fxpipe.torch_internals.tracing.tensors_without_memory import FakeTensorMode, own_kernels
from fxpipe.torch_internals.tracing.trace_context import translator

from .layer_trace import LayerCall, LayerFunction, LayerTrace, NotSeparate, filled, hollow_like
from .layer_values import LayerRun
from .place_layers import Placed, place_layers
from .repeated import repeated
from .run_layer import run_layer

log = logging.getLogger("fxpipe")
LITERALS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class Outer:
    """The trace of the model that is being taken: what it has seen, which that of a layer sees too."""

    contexts: Contexts
    floats: list[float]
    effects: list[PythonEffects]
    modes: tuple[Any, ...]


@dataclass(eq=False)
class SeparateLayer:
    """A repeated layer that is traced separately: its twin, and the function that replaces the twin's forward and adds
    one op to the model's trace."""

    twin: nn.Module
    forward: Callable[..., Any]


class Layers:
    """The layers of a model that are traced separately.

    - `enabled`: False after `give_up`: all layers are traced with the model from then on.
    - `suspended`: True until `forget`: all layers are traced with the model, to see whether one of them was the cause
      of a refusal, or because the model sets a mode of torch's around one.
    - `by_twin`: these layers, by the ids of their twins.
    - `left_out`: the ids of twins that cannot be traced separately, and classes of which two cannot.
    - `calls`: what the ops of the current trace stand for, by the id of the first tensor that they make: the call, the
      run of the layer's graph, and all tensors that they make.
    """

    def __init__(self) -> None:
        self.enabled, self.suspended = True, False
        self.by_twin: dict[int, SeparateLayer] = {}
        self.left_out: set[Any] = set()
        self.calls: dict[int, tuple[LayerCall, LayerRun, list[Tensor]]] = {}
        self.refused: tuple[SeparateLayer, str] | None = None
        self._gone: list[SeparateLayer] = []
        self._functions: dict[type, LayerFunction] = {}
        self._outer: Outer | None = None
        self._twins: Twins | None = None
        self._state: tuple[Any, ...] = ()

    def forget(self) -> None:
        """Forget what was traced."""
        self._functions.clear()
        self.calls.clear()
        self.suspended, self._state = False, ()

    def give_up(self) -> None:
        """Trace all layers with the model from now on."""
        self.enabled, self._state = False, ()
        if self._twins is not None:
            self.renew(self._twins)

    def renew(self, twins: Twins) -> None:
        """Trace separately the repeated layers that the twins have now."""
        self._twins = twins
        global_hooks = any(GLOBAL_HOOKS)
        state = twins.latest_change, self.enabled, self.suspended, len(self.left_out), global_hooks
        if self._state and all(a is b or a == b for a, b in zip(state, self._state, strict=True)):
            return
        self._state = state
        found: list[nn.Module] = []
        if self.enabled and not (self.suspended or global_hooks):
            found = [module for module in repeated([module for _, module in twins.named()]) if self._may_be(module)]
        there = {id(module) for module in found}
        for key, separate in list(self.by_twin.items()):
            if key not in there:
                del self.by_twin[key]
                if vars(separate.twin).get("forward") is separate.forward:
                    twins.put_method(separate.twin, None)
        for module in found:
            if id(module) not in self.by_twin:
                self.by_twin[id(module)] = separate = self._separate(module)
                twins.put_method(module, separate.forward)

    def _may_be(self, module: nn.Module) -> bool:
        separate = self.by_twin.get(id(module))
        assert self._twins is not None
        own = vars(module).get("forward")
        free = own is None or (separate is not None and own is separate.forward)
        free = free and "forward" not in vars(self._twins.original(module))
        return free and id(module) not in self.left_out and type(module) not in self.left_out

    def _separate(self, twin: nn.Module) -> SeparateLayer:
        own, layer_of = weakref.ref(self), weakref.ref(twin)

        def layer(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            layers, module = own(), layer_of()
            assert module is not None
            if layers is None or layers._outer is None:
                return type(module).forward(module, *args, **kwargs)
            return layers._made(layers.by_twin[id(module)], args, kwargs)

        op = torch.compiler.allow_in_graph(layer)  # type: ignore[no-untyped-call]
        layer.fxpipe_layer = True  # type: ignore[attr-defined]

        def forward(*args: Any, **kwargs: Any) -> Any:  # traced by Dynamo
            return op(args, kwargs)

        # By its code Dynamo tells one layer from another, whatever list it takes it from.
        code = forward.__code__.replace(co_name=f"forward_{next(numbers)}")
        own_forward = FunctionType(code, forward.__globals__, "forward", None, forward.__closure__)
        return SeparateLayer(twin, own_forward)

    def leave_out(self, modules: tuple[int, ...] | None, why: str, in_vain: bool) -> bool:
        """After a refusal in these modules: trace the layer that is the cause with the model, or all, unless that was
        `in_vain` before. Returns whether there is another trace."""
        refused, self.refused = self.refused, None
        if refused is None and modules and modules[-1] in self.by_twin:
            refused = self.by_twin[modules[-1]], why.split("\n", 1)[0]
        if refused is None:
            if in_vain or not self.by_twin:
                return False
            self.suspended = True
            log.debug("all layers are traced with the model, to see whether it is one that cannot be: %s", why)
        else:
            separate, reason = refused
            assert self._twins is not None
            kind, path = type(separate.twin), self._path(separate.twin)
            again = any(id(other.twin) in self.left_out and type(other.twin) is kind for other in self._gone)
            self.left_out.add(kind if again else id(separate.twin))
            self._gone.append(separate)
            log.debug("%s (%s) is traced with the model: %s", path, kind.__name__, reason)
        assert self._twins is not None
        self.renew(self._twins)
        return True

    def _path(self, twin: nn.Module) -> str:
        assert self._twins is not None
        return next((path for path, module in self._twins.named() if module is twin), "?")

    # While the model is traced ---------------------------------------------------------------------------------------

    @contextmanager
    def tracing(self, outer: Outer) -> Iterator[None]:
        """A context in which the model is traced."""
        before, self._outer, self.refused = self._outer, outer, None
        self.calls.clear()
        try:
            yield
        finally:
            self._outer = before
            self.calls.clear()

    def placed(self, module: fx.GraphModule, mode: FakeTensorMode) -> Placed:
        """The trace of the model, with its layers."""
        assert self._twins is not None
        return place_layers(module, self.calls, self._twins.slot_by_id, mode)

    def _made(self, separate: SeparateLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the op of a layer makes of fake tensors."""
        try:
            return self._known(separate, args, kwargs)
        except Exception as error:
            why = str(error) if isinstance(error, NotSeparate) else f"{type(error).__name__}: {error}"
            self.refused = separate, why
            raise RuntimeError("a layer is traced with the model") from None

    def _known(self, separate: SeparateLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outer = self._outer
        assert outer is not None
        assert self._twins is not None
        tx = translator()
        if modes() != outer.modes or tx.symbolic_torch_function_state.mode_stack:
            self.suspended = True
            raise NotSeparate("the model sets a mode of torch's around it")
        changes, variables = changed(tx.output.side_effects), outer.contexts.set_in(tx.output)
        fakes: list[Any] = list({id(fake): fake for fake in tensors_in((args, kwargs))}.values())
        if not fakes:
            raise NotSeparate("it is given no tensor")
        with self._alone(outer), without_modes(), own_kernels():
            hollows = {id(fake): hollow_like(fake, marked=True) for fake in fakes}
            given = tuple(hollows.values())
            hollow_args, hollow_kwargs = (_in_place(value, hollows) for value in (args, kwargs))
            call = self._function(type(separate.twin)).call(separate.twin, hollow_args, hollow_kwargs, given)
        trace = call.trace
        if changes and not (trace.objects | leads_to(separate.twin)).isdisjoint(changes):
            raise NotSeparate("it reads what the model has changed before")
        if not trace.variables.isdisjoint(variables):
            raise NotSeparate("it reads a context variable that the model has set")
        self._check(call, outer)
        key = tuple(map(_kind, fakes)), torch.is_grad_enabled()
        known = trace.known_in(fakes[0].fake_mode)
        run = known.get(key)
        if run is None:
            run = known[key] = run_layer(call, fakes)
            made = [run.values[node] for node in trace.outputs]
        else:
            made = [_like(run.values[node]) for node in trace.outputs]
        self.calls[id(made[0])] = call, run, made
        return filled(trace.result, [*made, *fakes])

    @contextmanager
    def _alone(self, outer: Outer) -> Iterator[None]:
        """A context in which what the model's trace has seen is laid aside, while a layer is traced."""
        contexts = outer.contexts
        before = contexts.output, contexts.values
        contexts.output, contexts.values = None, {}
        try:
            yield
        finally:
            contexts.output, contexts.values = before

    def _function(self, kind: type) -> LayerFunction:
        if kind not in self._functions:
            self._functions[kind] = LayerFunction(str(next(numbers)), self._note)
        return self._functions[kind]

    def _note(self, trace: LayerTrace) -> None:
        """A layer has been traced, and its guards are not made yet."""
        outer = self._outer
        assert outer is not None
        effects = outer.effects.pop() if outer.effects else PythonEffects()
        if not effects.none:
            raise NotSeparate("it changes more than tensors")
        trace.objects, trace.variables = effects.reached, frozenset(outer.contexts.values)
        if outer.contexts.left:
            raise NotSeparate("it sets a context variable")
        trace.floats = tuple(outer.floats)

    def _check(self, call: LayerCall, outer: Outer) -> None:
        """Raise NotSeparate unless this layer may use the trace: it must not reach the user's modules past their twins,
        nor take tensors other than the model's and its arguments. Floats of numpy's are noted for the model's trace."""
        trace, twins = call.trace, self._twins
        assert twins is not None
        if twins.reached(trace.reached()):
            raise NotSeparate("it reaches modules by other ways than the model")
        if any(isinstance(x, Tensor) and not (id(x) in twins.slot_by_id or _is_one(x, call.given)) for x in call.taken):
            raise NotSeparate("it reads a tensor that is no parameter or buffer")
        outer.floats.extend(trace.floats)


def modes() -> tuple[Any, ...]:
    """The modes of torch in which ops run."""
    devices = "cpu", "cuda"
    return (
        (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
        tuple((torch.is_autocast_enabled(x), torch.get_autocast_dtype(x)) for x in devices),
        (torch.is_autocast_cache_enabled(), torch.are_deterministic_algorithms_enabled()),
    )


def leads_to(layer: nn.Module) -> set[int]:
    """The ids of the objects that the layer holds."""
    seen: dict[int, Any] = {}
    todo: list[tuple[Any, int]] = [(module, 0) for module in layer.modules()]
    while todo:
        value, depth = todo.pop()
        if id(value) not in seen and not isinstance(value, (Tensor, *LITERALS)):
            seen[id(value)] = value
            inside = [*value] if isinstance(value, (list, tuple, set)) else [*getattr(value, "__dict__", {}).values()]
            inside += [*value.values()] if isinstance(value, dict) else []
            todo += [(one, depth + 1) for one in inside] if depth < 4 and not isinstance(value, type) else []
    return set(seen)


def _is_one(tensor: Tensor, of: tuple[Tensor, ...]) -> bool:
    return any(tensor is one for one in of)


def _in_place(value: Any, hollows: dict[int, Tensor]) -> Any:
    """An argument with stand-ins in place of its tensors. Raises NotSeparate."""
    if isinstance(value, Tensor):
        return hollows[id(value)]
    if type(value) is tuple:
        return tuple(_in_place(item, hollows) for item in value)
    if type(value) in (list, immutable_list):  # as torch.fx has them
        return [_in_place(item, hollows) for item in value]
    if type(value) in (dict, immutable_dict):
        return {key: _in_place(item, hollows) for key, item in value.items()}
    if value is None or type(value) in (bool, int, float, str, torch.dtype, torch.device):
        return value
    raise NotSeparate(f"it is given a {type(value).__name__}")


def _kind(fake: Any) -> Any:
    numbers = (*fake.shape, *fake.stride(), fake.storage_offset())
    said = tuple(n.node.expr if isinstance(n, torch.SymInt) else n for n in numbers)
    return fake.dim(), said, fake.dtype, fake.device, fake.requires_grad


def _like(value: Any) -> Tensor:
    """Another fake tensor of the same kind, as an op makes it: no leaf, if it has a gradient."""
    with torch.enable_grad():
        if _kind(made := value.clone()) == _kind(value):  # its strides are those of dense memory
            return made  # type: ignore[no-any-return]
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return made.requires_grad_().clone() if value.requires_grad else made

"""Lets Dynamo trace one of the equal layers of a model, and put one op into the graph for each call of another.

    x = self.h[0](x)       is traced: its nodes are remembered, and what it was called with
    x = self.h[1](x)       one op, `copied_layer`, on the same kind of arguments

`inline_layers.py` puts the remembered nodes, with the other layer's tensors, in place of the op. So the graph is the
one that Dynamo makes of each layer. What is not certain to be traced alike is traced: see `Recorder`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import variables
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import builtin
from torch._dynamo.variables.base import MutationType, VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

from fxpipe.capture.twins.equal_modules import EqualModules, Pairs, Reliance

from .context_variables import Contexts
from .layer_values import SYMBOLIC, Given, Odd, Output, check, described, fake_kind, first_name, like, real_id, returned
from .patched import GETATTR, knows, patched

# Where torch has other parts, each layer is traced.
KNOWN = knows(
    (UnspecializedNNModuleVariable, "call_function"),
    (UnspecializedNNModuleVariable, GETATTR),
    (UserDefinedObjectVariable, "hash_impl"),
    (variables.TensorVariable, "hash_impl"),
    (VariableTracker, "get_id"),
    (SideEffects, "check_allowed_side_effect"),
    (builtin, "vt_identity_compare"),
)


def copied_layer(*values: Any) -> Any:
    """Marks the call of a layer that is equal to a traced one; it never runs."""
    raise AssertionError("a layer has not been put in place of its mark")


@dataclass(frozen=True, eq=False)
class Made:
    """A node of a traced layer, as it was made.

    - `first`, `name`: its first name, and that after the user's variable.
    """

    node: fx.Node
    args: Any
    kwargs: Any
    first: str
    name: str


@dataclass(frozen=True, eq=False)
class Layer:
    """A traced layer.

    - `state`: that of the trace at its end.
    - `module`, `reads`: the layer, and the attributes that its forward reads, by the id of the module.
    - `nodes`: what it made; `given`: its arguments; `outer`: what it uses besides; `own`: its tensors, with their ids.
    - `result`: what it returned.
    - `stack`: the stack of its call.
    """

    state: Hashable
    module: nn.Module
    reads: Mapping[int, frozenset[str]]
    nodes: tuple[Made, ...]
    given: tuple[fx.Node, ...]
    outer: tuple[fx.Node, ...]
    own: Mapping[fx.Node, int]
    result: Any
    stack: str


@dataclass(frozen=True, eq=False)
class Copied:
    """A call of another layer: the traced one, the parts of both in pairs, and the placeholders that the graph had
    then, of which Dynamo may drop some."""

    layer: Layer
    pairs: Pairs
    there: tuple[fx.Node, ...]


@dataclass(eq=False)
class Open:
    """A layer that is being traced: the attributes read by now, by the id of the module; what was made in it that may
    change; and whether it is certain that another layer is traced alike."""

    reads: dict[int, set[str]] = field(default_factory=dict)
    made: dict[int, Any] = field(default_factory=dict)
    alike: bool = True


class Recorder:
    """Remembers the layers of one trace. Dynamo may restart a trace, with another `output`.

    A layer stands for another one if

    - both are built alike, and agree in every attribute that forward reads (`equal_modules.py`)
    - arguments are tensors of the same types and sizes, in the same relations, or equal numbers and strings
    - forward changes nothing but tensors: no attribute, list or dict that is older than the call
    - forward gives tensors, numbers, None, or tuples of these
    - it reads no tensor that the trace has computed, but its arguments
    - it does not ask which module it is: by `is`, `id` or a hash
    - nothing that it may read has changed between the calls: objects, context variables, torch's modes

    - `layers`: those traced, by their group and what they were called with; `odd`: groups of which each is traced.
    - `events`: how often anything was changed; `old`: how often what is older than the trace.
    """

    def __init__(self, equal: EqualModules, contexts: Contexts) -> None:
        self.equal, self.contexts = equal, contexts
        self.output: Any = None
        self.layers: dict[Hashable, list[Layer]] = {}
        self.odd: set[int] = set()
        self.open: Open | None = None
        self.events = self.old = 0

    def at(self, output: Any) -> None:
        """Start again if the trace has."""
        if self.output is not output:
            self.output, self.layers, self.odd, self.open, self.events, self.old = output, {}, set(), None, 0, 0

    # What forward does ----------------------------------------------------------------------------------------------

    def read(self, module: nn.Module, name: str) -> None:
        """An attribute was read."""
        if self.open is not None:
            self.open.reads.setdefault(id(module), set()).add(name)
            self.open.alike &= name != "__dict__"

    def made(self, kind: MutationType) -> None:
        """Something was made or found that may change."""
        if self.open is not None and kind.scope != 0:
            self.open.made[id(kind)] = kind

    def changed(self, output: Any, kind: Any) -> None:
        """Something was changed."""
        self.at(output)
        self.events += 1
        self.old += getattr(kind, "scope", 0) == 0
        if self.open is not None:
            self.open.alike &= id(kind) in self.open.made

    def identified(self, *items: Any) -> None:
        """It was asked which modules or tensors these are."""
        which = UnspecializedNNModuleVariable, variables.TensorVariable
        if self.open is not None and all(isinstance(item, which) for item in items):
            self.open.alike = False

    # Calls ----------------------------------------------------------------------------------------------------------

    def call(self, tx: Any, called: Any, args: Any, kwargs: Any, trace: Callable[[], Any]) -> Any:
        """The result of the call of a module."""
        self.at(tx.output)
        group = self.equal.groups.get(id(called.value))
        tracer = tx.output.current_tracer
        if group is None or group in self.odd or self.open is not None or tracer.parent is not None:
            return trace()
        if not called.source:
            return _cached(tx, trace)
        items: list[Any] = []
        try:
            said = described((tuple(args), tuple(kwargs.items())), items)
            given = [item.as_proxy().node for item in items]
            what = group, said, tuple(map(given.index, given))
            before = self._state(tx)
        except Odd:
            return _cached(tx, trace)
        for layer in self.layers.get(what, ()):
            if layer.state == before and (found := self._copied(layer, called.value, given, tracer)) is not None:
                install_guard(called.source.make_guard(GuardBuilder.ID_MATCH))
                return _put(tx, found, items, tracer)
        return self._traced(tx, called, what, given, before, trace)

    def _copied(self, layer: Layer, other: nn.Module, given: Sequence[fx.Node], tracer: Any) -> Copied | None:
        """The call of this module as that of a copy; None if it is not equal."""
        found = self.equal.pairs(layer.module, other)
        if found is None or not self.equal.agree(found, layer.reads):
            return None
        if any(real_id(node) in found.own for node in (*given, *layer.given, *layer.outer)):
            return None
        self.equal.relied.append(Reliance(layer.module, other, layer.reads))
        return Copied(layer, found, tuple(takewhile(lambda node: node.op == "placeholder", tracer.graph.nodes)))

    def _traced(
        self, tx: Any, called: Any, what: Any, given: list[fx.Node], before: Hashable, trace: Callable[[], Any]
    ) -> Any:
        """Trace a layer, and remember it if it may stand for others."""
        graph = tx.output.current_tracer.graph
        there = {node for node in graph.nodes if node.op != "placeholder"}
        kinds = [fake_kind(node) for node in given]
        self.open = now = Open()
        try:
            result = trace()
        finally:
            self.open = None
        self.at(tx.output)
        try:
            after = self._state(tx)
            if not now.alike or after != before or kinds != [fake_kind(node) for node in given]:
                raise Odd
            new = [node for node in graph.nodes if node.op != "placeholder" and node not in there]
            layer = self._layer(called.value, now, given, new, result, after, _stack(tx))
            if not all((made.node.stack_trace or "").startswith(layer.stack) for made in layer.nodes):
                raise Odd
        except Odd:
            self.odd.add(what[0])
            tx.fake_mode.cache_enabled = True
            return result
        install_guard(called.source.make_guard(GuardBuilder.ID_MATCH))
        self.layers.setdefault(what, []).append(layer)
        return result

    def _layer(
        self,
        module: nn.Module,
        now: Open,
        given: list[fx.Node],
        new: list[fx.Node],
        result: Any,
        state: Any,
        stack: str,
    ) -> Layer:
        tensors = {
            id(x) for part in module.modules() for held in (part._parameters, part._buffers) for x in held.values()
        }
        inside = set(new)
        own: dict[fx.Node, int] = {}
        outer: dict[fx.Node, None] = {}
        for node in new:
            check(node)
            for used in node.all_input_nodes:
                if used in inside or used in given:
                    continue
                if used.op == "placeholder" and real_id(used) in tensors:
                    own[used] = real_id(used)
                elif used.op == "placeholder" or isinstance(used.meta.get("example_value"), SYMBOLIC):
                    outer[used] = None
                else:
                    raise Odd
        if not set(given).isdisjoint(own):
            raise Odd
        places = {node: place for place, node in enumerate(new[0].graph.nodes if own else ())}
        own = dict(sorted(own.items(), key=lambda pair: places[pair[0]]))  # as Dynamo found them
        nodes = tuple(Made(node, node.args, node.kwargs, first_name(node), node.name) for node in new)
        reads = {key: frozenset(names) for key, names in now.reads.items()}
        gives = returned(result, given, inside)
        return Layer(state, module, reads, nodes, tuple(given), tuple(outer), own, gives, stack)

    def _state(self, tx: Any) -> Hashable:
        """What a layer may read besides its arguments and the model. Raises Odd."""
        if getattr(tx.symbolic_torch_function_state, "mode_stack", None):
            raise Odd
        effects = tx.output.side_effects
        contexts = self.contexts.tokens(tx.output)
        open_to_all = self.old or contexts
        devices = "cpu", "cuda"
        return (
            (self.old, self.events if open_to_all else 0, contexts),
            (len(effects.save_for_backward), len(effects.tensor_hooks), len(tx.output.random_calls)),
            (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
            tuple((torch.is_autocast_enabled(x), torch.get_autocast_dtype(x)) for x in devices),
            (torch.is_autocast_cache_enabled(), torch.are_deterministic_algorithms_enabled()),
        )


def _cached(tx: Any, trace: Callable[[], Any]) -> Any:
    """Trace one of equal layers that are each traced, with what ops made of the same types before."""
    tx.fake_mode.cache_enabled = True
    return trace()


@contextmanager
def recorded_layers(equal: EqualModules | None, contexts: Contexts) -> Iterator[None]:
    """A context in which Dynamo traces one of equal layers."""
    if equal is None or not equal.groups or not KNOWN:
        yield
        return
    recorder = Recorder(equal, contexts)
    module: Any = UnspecializedNNModuleVariable
    kind: Any = MutationType
    calling, reading, making = module.call_function, getattr(module, GETATTR), kind.__init__
    checking: Any = SideEffects.check_allowed_side_effect

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        return recorder.call(tx, self, args, kwargs, lambda: calling(self, tx, args, kwargs))

    def var_getattr(self: Any, tx: Any, name: str) -> Any:
        recorder.read(self.value, name)
        return reading(self, tx, name)

    def check_allowed_side_effect(self: Any, item: Any) -> Any:
        recorder.changed(self.output_graph_weakref(), item.mutation_type)
        return checking(self, item)

    def made(self: Any, *args: Any) -> None:
        making(self, *args)
        recorder.made(self)

    def identified(asking: Any, count: int) -> Any:
        def ask(*args: Any) -> Any:
            recorder.identified(*args[:count])
            return asking(*args)

        return ask

    comparing: Any = builtin.vt_identity_compare  # type: ignore[attr-defined]
    identity = identified(comparing, 2)
    with ExitStack() as patches:
        for owner, functions in (
            (module, {"call_function": call_function, GETATTR: var_getattr}),
            (SideEffects, {"check_allowed_side_effect": check_allowed_side_effect}),
            (kind, {"__init__": made}),
            (VariableTracker, {"get_id": identified(VariableTracker.get_id, 1)}),
            (UserDefinedObjectVariable, {"hash_impl": identified(UserDefinedObjectVariable.hash_impl, 1)}),
            (variables.TensorVariable, {"hash_impl": identified(variables.TensorVariable.hash_impl, 1)}),
            (sys.modules[comparing.__module__], {"vt_identity_compare": identity}),
            (builtin, {"vt_identity_compare": identity}),
        ):
            patches.enter_context(patched(owner, **functions))
        yield


def _output(value: Any) -> Any:
    """Marks a tensor that a copied layer makes."""
    raise AssertionError("a layer has not been put in place of its mark")


def _put(tx: Any, copied: Copied, given: list[Any], tracer: Any) -> Any:
    """Put an op for the call of a layer into the graph. Returns what the call returns."""
    args = (*(item.as_proxy() for item in given), *(fx.Proxy(node, tracer) for node in copied.layer.outer))
    mark = tx.output.create_proxy("call_function", copied_layer, args, {})
    mark.node.meta["copied"] = copied
    outputs: dict[fx.Node, Any] = {}

    def build(item: Any) -> Any:
        if isinstance(item, list):
            return variables.TupleVariable([build(part) for part in item])
        if isinstance(item, Given):
            return given[item.place]
        if not isinstance(item, Output):
            return item
        if item.node not in outputs:
            proxy = tx.output.create_proxy("call_function", _output, (mark,), {})
            proxy.node.meta["output"] = item.node
            outputs[item.node] = wrap_fx_proxy(tx, proxy, like(tx, item.value))
            outputs[item.node]._is_name_set = item.named
        return outputs[item.node]

    return build(copied.layer.result)


def _stack(tx: Any) -> str:
    """The stack of the current line, as Dynamo writes it to nodes."""
    node = tx.output.create_proxy("call_function", _output, (), {}).node
    tx.output.remove_node(node)
    return str(node.stack_trace)

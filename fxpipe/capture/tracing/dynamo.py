"""Tracing with Dynamo: torch.compile traces the model's bytecode; fxpipe takes the graph and runs it.

`dynamo(function, owner)` returns a compiled replacement for `function`. Each time Dynamo compiles, the graph goes to
`owner().captured(traced)`; the callable that this returns is what Dynamo runs, with the flat graph inputs, whenever the
guards match.
"""

from __future__ import annotations

import builtins
import itertools
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from fxpipe.capture.call_arguments import Leaf
from fxpipe.capture.capture_errors import Refused, Sizes, refusal
from fxpipe.errors import CaptureError
from fxpipe.ir.graph.evaluate_graph import left_to_right
from fxpipe.ir.graph.graph import Origin
from fxpipe.runtime.interrupts import Interrupts
from fxpipe.torch_internals.compiling.compiled_code import (
    COMPILED_CODE,
    SWITCHED_OFF,
    compiled_for,
    forget_with,
    is_switched_off,
    one_at_a_time,
)
from fxpipe.torch_internals.compiling.compiler import COMPILER, compiled, is_refusal, settings
from fxpipe.torch_internals.compiling.dynamic_sizes import DYNAMIC_SIZES, one_symbol_a_size, size_of_tensor, source_of
from fxpipe.torch_internals.compiling.vmap_levels import VMAP_LEVELS
from fxpipe.torch_internals.tracing.composite_ops import composed_in_python, one_step
from fxpipe.torch_internals.tracing.context_variables import Contexts, context_variables
from fxpipe.torch_internals.tracing.cudnn_flags import cudnn_flags
from fxpipe.torch_internals.tracing.gradient_flags import gradients_that_nobody_gets
from fxpipe.torch_internals.tracing.is_compiling import not_compiling
from fxpipe.torch_internals.tracing.known_values import known_values
from fxpipe.torch_internals.tracing.numpy_folding import folding
from fxpipe.torch_internals.tracing.patched import quiet
from fxpipe.torch_internals.tracing.python_effects import PythonEffects, python_effects
from fxpipe.torch_internals.tracing.remembered_items import REMEMBERED_ITEMS, no_items_of
from fxpipe.torch_internals.tracing.saved_variables import saved_variables
from fxpipe.torch_internals.tracing.tensors_without_memory import FakeTensor, FakeTensorMode
from fxpipe.torch_internals.tracing.trace_context import TRACE_CONTEXT, guarded, translator_in, untimed_guards

from .effects.recorded_runs import recorded_runs
from .input_values import NO_ASSERTIONS, Assertions, ReadValues, ValuesRead, assertions
from .layers.place_layers import Placed
from .layers.separate_layers import Layers, Outer, modes
from .rewriting.inline_checkpoints import inline_checkpoints
from .storageless_tensors import has_no_values

MOST_TRACES = 64  # of one function
MOST_WITH_VALUES = 16
log = logging.getLogger("fxpipe")
SETTINGS: dict[str, object] = {
    "allow_rnn": True,  # nn.LSTM and its kind, as one op
    "allow_unspec_int_on_nn_module": True,  # self.counter += 1: one more capture, not one per call
    "allow_empty_graphs": True,  # nn.Identity
    "capture_dynamic_output_shape_ops": True,  # x[mask], as far as a size that data decides can be followed
    # A shortcut of the guards of modules, which does not see that a variable of a closure has changed.
    "use_recursive_dict_tags_for_guards": False,
    "recompile_limit": MOST_TRACES,
    "record_runtime_overhead": False,  # two calls more in each call of what is compiled, for torch's own profiles
    "accumulated_recompile_limit": 1024,
    "verbose": False,
    "issue_3_13_0_warning": False,  # of Python 3.13.0 alone: for whoever makes errors of warnings, it ends the trace
    # What ops make of symbolic sizes takes longer to remember than to make, unless many ops are the same.
    "fake_tensor_cache_enabled": False,
}
GRADIENT_ASKED = ("setattr() on Tensor.", "Unsupported Tensor.", "intermediate with ")
# Further modes of tracing a model, with parts of the refusals that they may avoid.
TRACE_MODES = {
    "deep": (
        "Attempted to call function marked as skipped",
        *(f"{how}requires_grad" for how in GRADIENT_ASKED),
        "returning intermediate with requires_grad_()",  # in its place from torch 2.14 on
    ),
    "plain": ("Observed exception",),
    "values": ("ata-dependent", "Tensor.item()", "tolist()"),
}
# Methods of loggers that are left out of the trace, as warnings.warn is; libraries add methods to the class.
LOGGING = ("debug", "info", "warning", "debug_once", "info_once", "warning_once", "warning_advice")


@dataclass(frozen=True)
class Traced:
    """Dynamo's trace of one kind of call.

    - `module`, `mode`: the graph, and the mode of its fake tensors.
    - `names`: for each placeholder its source by Dynamo's name; (name, dim) for the size of a tensor.
    - `boxed`: for each placeholder whether it is a Python number in a tensor.
    - `folded`: whether numpy has made floats of plain numbers.
    - `guarded`: returns the objects that Dynamo guards; can be called once.
    - `placed`: the graph as it was traced, with its layers.
    - `read`: the values of inputs that forward has read; `asserts`: what it asserts, which is no op.
    """

    module: fx.GraphModule
    mode: FakeTensorMode
    names: tuple[str | tuple[str, int], ...]
    boxed: tuple[bool, ...]
    folded: bool = False
    guarded: Callable[[], list[Any]] = list
    placed: Placed | None = None
    read: ValuesRead | None = None
    asserts: Assertions = NO_ASSERTIONS


class Captures(Protocol):
    """Who asks for traces.

    - `layers`: they are traced alone.
    - `trace_modes`: how to trace.
    """

    layers: Layers
    trace_modes: TraceModes

    def starts(self) -> None:
        """Called before a new kind of call is traced."""

    def input_of(self, stand_in: Tensor) -> Leaf | None:
        """The input that a hollow argument stands for."""

    def captured(self, traced: Traced) -> Callable[..., Any]:
        """The function that is called for a kind of call that has been traced."""


numbers = itertools.count()


def dynamo(function: Callable[..., Any], owner: weakref.ref[Captures]) -> Callable[..., Any]:
    """The function to call with the twin of a model and hollow arguments, in place of `function(model, *arguments)`."""

    def own() -> Captures:
        found = owner()
        assert found is not None
        return found

    def backend(module: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        inline_checkpoints(module)
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        # Not the tracing context's mode, which is another one while the backend runs.
        values = [node.meta["example_value"] for node in placeholders]
        mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None) or FakeTensorMode()
        asserts = assertions(module.graph, own().input_of)
        placed = own().layers.placed(module, mode)
        names = tuple(_name(placeholders[at]) if isinstance(at, int) else "" for at in placed.places)
        boxed = tuple(isinstance(at, int) and is_boxed(placeholders[at]) for at in placed.places)
        folded, read = bool(configured.floats), configured.values.of_inputs
        configured.values = ReadValues(_no_input)  # without what it has seen of the trace
        own().trace_modes.traces_with_values += read is not None
        return own().captured(Traced(placed.module, mode, names, boxed, folded, guarded(), placed, read, asserts))

    for capability in (COMPILER, COMPILED_CODE, TRACE_CONTEXT, DYNAMIC_SIZES, VMAP_LEVELS, REMEMBERED_ITEMS):
        capability.need("capturing a model")
    configured = _Configured(own)
    fresh = _fresh(function)
    run = compiled(fresh, backend, configured.compiling)
    if run is None:
        raise CaptureError(SWITCHED_OFF)

    def call(*given: Any) -> Any:
        if is_switched_off():
            raise CaptureError(SWITCHED_OFF)
        refused: Refused | None = None
        while True:
            configured.modules, configured.sizes = None, {}
            try:
                with Interrupts():  # Dynamo drops exceptions in guards
                    return (_known(fresh, given) or run)(*given)
            except Exception as error:  # Dynamo may also fail with other exceptions, on code without source
                if not is_refusal(error) and configured.modules is None:
                    raise  # the pipeline's, which runs in here
                layers, trace_modes = own().layers, own().trace_modes
                steered = configured.values.of_inputs is not None
                found = refusal(error, configured.modules, sizes=configured.sizes, steered=steered)
                so_far = found.where, trace_modes.used
                if found.where is not None and not layers.by_twin:
                    trace_modes.in_vain.add(so_far)
                if layers.leave_out(configured.modules, str(error), so_far in trace_modes.in_vain):
                    continue
                if refused is None or trace_modes.further(str(error)):
                    refused = found
                if not trace_modes.another(str(error), found.where):
                    raise refused from None
                layers.forget()

    forget_with(call, fresh)
    return call


def _known(function: FunctionType, given: tuple[Any, ...]) -> Callable[..., Any] | None:
    """What was compiled for calls like this one."""
    if torch.jit.is_tracing():  # type: ignore  # Dynamo says why it refuses this
        return None
    found = compiled_for(function, given)
    return None if found is None else found.run


def _fresh(function: Callable[..., Any]) -> FunctionType:
    """A copy of the function with its own code and globals, for each pipe: Dynamo keeps its cache, its limit and what
    it learns about sizes by code object, and puts compiled functions into the globals."""
    assert isinstance(function, FunctionType)
    code, known = function.__code__, function.__globals__
    name = f"{code.co_name}_{next(numbers)}"
    own = {"__name__": function.__module__, "__builtins__": builtins}
    own |= {used: known[used] for used in code.co_names if used in known}
    return FunctionType(code.replace(co_name=name), own, name)


class TraceModes:
    """Further modes of tracing that are in use, for all traces of a model's calls.

    - "deep": also trace functions that Dynamo skips as Python's or torch's own; forward may set `requires_grad` of a
      tensor that it made.
    - "plain": `is_compiling()` is false, because some models leave out too much when it is true.
    - "values": what Python reads of inputs is known.

    Those that are `barred` are not used any more. `traces_with_values`: how many traces have read values of inputs;
    `other_values`: whether the current call has others than one of them. `in_vain`: the lines, with the
    modes, that were refused with all layers in the model's trace; of one call.
    """

    def __init__(self) -> None:
        self.used: frozenset[str] = frozenset()
        self.barred: frozenset[str] = frozenset()
        self.traces_with_values, self.other_values = 0, False
        self.in_vain: set[tuple[Origin | None, frozenset[str]]] = set()

    def another(self, refusal: str, line: Origin | None) -> bool:
        """Whether another mode of tracing may avoid this refusal in a line. If not, the next call begins with none."""
        fitting = (mode for mode, signs in TRACE_MODES.items() if any(sign in refusal for sign in signs))
        news = {mode for mode in fitting if self.may(mode)}
        if (line, self.used | news) in self.in_vain:
            news = set()
        self.used = self.used | news if news else frozenset()
        return bool(news)

    def may(self, mode: str) -> bool:
        """Whether the mode is neither in use nor barred."""
        return mode not in self.used | self.barred

    def give_up_values(self) -> bool:
        """Bar the reading of values if they are others in most batches. Returns whether that is new."""
        if self.traces_with_values <= MOST_WITH_VALUES or "values" in self.barred:
            return False
        log.info("what reads values of inputs is kept whole from now on, as they are others in most batches")
        self.barred |= {"values"}
        return True

    @contextmanager
    def without_values(self) -> Iterator[None]:
        """A context in which values of inputs are not read; and after it neither, if nothing fails in it."""
        before, self.barred = self.barred, self.barred | {"values"}
        try:
            yield
        except BaseException:
            self.barred = before
            raise

    def further(self, refusal: str) -> bool:
        """Whether this trace got further than the refused one before: the model only raised because `is_compiling()`
        was true, or stopped where a value of an input was read."""
        return any(
            mode in self.used and not any(sign in refusal for sign in TRACE_MODES[mode]) for mode in ("plain", "values")
        )


class _Configured:
    """How Dynamo compiles: under our settings.

    - `modules`: the ids of the modules in which it stopped, outermost first; `sizes`: the sources of its symbols.
    - `floats`: the floats that numpy made of plain numbers; `effects`: what the trace does besides the ops; `values`:
      the values of inputs that it has read.
    """

    def __init__(self, owner: Callable[[], Captures]) -> None:
        self.owner = owner
        self.modules: tuple[int, ...] | None = None
        self.sizes: Sizes = {}
        self.floats: list[float] = []
        self.effects: list[PythonEffects] = []
        self.values = ReadValues(_no_input)

    def _input_of(self, stand_in: Tensor) -> Leaf | None:
        return self.owner().input_of(stand_in)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """A context in which a new kind of call is traced. Raises Refused."""
        owner = self.owner()
        owner.starts()
        used = owner.trace_modes.used
        # Settings are those of the whole process, so no other thread may compile meanwhile, ours or not.
        with one_at_a_time(), ExitStack() as contexts:
            methods = (getattr(logging.Logger, name, None) for name in LOGGING)
            known = SETTINGS | {"ignore_logging_functions": {*filter(None, methods), warnings.warn}}
            if "deep" in used:
                known["dont_skip_tracing"] = True
            self.floats, self.effects, variables = [], [], Contexts()
            self.values = ReadValues(self._input_of if "values" in used else _no_input)
            for context in (
                settings(known),
                *([gradients_that_nobody_gets()] if "deep" in used else []),
                *([not_compiling()] if "plain" in used else []),
                # Otherwise a dimension that happens to equal the batch size would get the same symbol.
                one_symbol_a_size(),
                left_to_right(),
                one_step(),
                composed_in_python(),
                folding(self.floats),
                known_values(self.values.value),
                saved_variables(),
                context_variables(variables),
                cudnn_flags(),
                recorded_runs(self.values.value),
                python_effects(self.effects),
                no_items_of(has_no_values),
                quiet("torch._subclasses.fake_tensor"),  # our error says it better
                untimed_guards(),
            ):
                contexts.enter_context(context)
            outer = Outer(variables, self.floats, self.effects, modes())
            contexts.enter_context(owner.layers.tracing(outer))
            try:
                yield
            except Exception as error:  # some are Python's own, of checks inside of Dynamo
                self.modules, self.sizes = _stopped(error)
                raise
            if variables.left:
                raise Refused(None, f"forward sets the context variable {variables.left[0]!r}", "reset it in the end")


def _no_input(stand_in: Tensor) -> None:
    """Values of inputs are not known."""


def _stopped(error: BaseException) -> tuple[tuple[int, ...] | None, Sizes]:
    """The ids of the modules whose forward Dynamo was tracing, outermost first, or None if it was not tracing; and the
    sources of its symbols."""
    found = translator_in(error)
    if found is None:
        return None, {}
    known = found.output.shape_env.var_to_sources.items() if found.output.shape_env is not None else ()
    sizes = {str(symbol): _size(sources[0]) for symbol, sources in known if sources}
    return tuple(int(key.partition("@")[0]) for key in found.nn_module_stack), sizes


def _name(placeholder: fx.Node) -> str | tuple[str, int]:
    source = source_of(placeholder)
    return "" if source is None else _size(source)


def _size(source: Any) -> str | tuple[str, int]:
    """How Dynamo spells where a value comes from: (name, dim) for the size of a tensor."""
    found = size_of_tensor(source)
    return str(source.name) if found is None else (found[0].name, found[1])


def source_name(placeholder: fx.Node) -> str:
    """The source of a placeholder's value by Dynamo's name; "" if it has none."""
    source = source_of(placeholder)
    return "" if source is None else str(source.name)


def is_boxed(placeholder: fx.Node) -> bool:
    """Whether a placeholder is a Python number in a tensor."""
    argument, value = placeholder.meta.get("grapharg"), placeholder.meta["example_value"]
    return isinstance(value, FakeTensor) and getattr(argument, "is_tensor", True) is False

"""The Dynamo route: torch.compile reads the model's bytecode, we take the graph and run it our way.

A route takes the function to be captured, and `capture(traced) -> callable`; it returns what to call in place of the
function. For each new kind of call it hands the graph that it traced to `capture`, and calls what that returned, with
the graph's flat arguments, whenever its guards find a call of that kind again.
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
from typing import Any

import torch
import torch.fx.experimental._config as shape_config
from torch import fx
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo import convert_frame, variables
from torch._dynamo.source import TensorProperty, TensorPropertySource
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import builtin, misc, tensor
from torch._dynamo.variables.torch import tracing_state_functions
from torch._guards import TracingContext
from torch._subclasses import FakeTensor, FakeTensorMode

from fxpipe.capture.capture_errors import Refused, Sizes, refusal
from fxpipe.errors import CaptureError

from .composite_ops import composed_in_python, one_step
from .context_variables import Contexts, context_variables
from .numpy_folding import folding
from .patched import patched

SETTINGS: dict[str, object] = {
    "allow_rnn": True,  # nn.LSTM and its kind, as one op
    "allow_unspec_int_on_nn_module": True,  # self.counter += 1: one more capture, not one per call
    "allow_empty_graphs": True,  # nn.Identity
    "recompile_limit": 64,
    "accumulated_recompile_limit": 1024,
    "verbose": False,
}
SWITCHED_OFF = (
    "torch.compile is switched off, which reads the model for fxpipe: leave out TORCHDYNAMO_DISABLE and "
    "torch.compiler.set_stance('force_eager')"
)
# Other ways to read a model, by what refusals say that they may avoid.
WAYS = {
    "deep": ("Attempted to call function marked as skipped", "setattr() on Tensor.requires_grad"),
    "plain": ("Observed exception",),
}
# Methods of loggers that may be left out, as warnings.warn is; libraries hang more of them onto the class.
LOGGING = ("debug", "info", "warning", "debug_once", "info_once", "warning_once", "warning_advice")


@dataclass(frozen=True)
class Traced:
    """What Dynamo traced of one kind of call. `names` says for each placeholder where its value comes from, as Dynamo
    spells it, with (name, dim) for the size of a tensor; `boxed`, whether it is a Python number put into a tensor.
    `folded`: numpy has made floats of plain numbers. `guarded` gives the objects that Dynamo has looked at, once."""

    module: fx.GraphModule
    mode: FakeTensorMode
    names: tuple[str | tuple[str, int], ...]
    boxed: tuple[bool, ...]
    folded: bool = False
    guarded: Callable[[], list[Any]] = list


Capture = Callable[[Traced], Callable[..., Any]]
numbers = itertools.count()


def dynamo(function: Callable[..., Any], capture: Capture, starts: Callable[[], None]) -> Callable[..., Any]:
    """What to call with the twin of a model and hollow arguments in place of `function(model, *arguments)`. `starts` is
    called before a kind of call is read that was not seen before."""

    def backend(module: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        # Not the tracing context's mode: for the time of the backend that is another one.
        values = [node.meta["example_value"] for node in placeholders]
        mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None) or FakeTensorMode()
        names, boxed = tuple(map(_name, placeholders)), tuple(map(is_boxed, placeholders))
        return capture(Traced(module, mode, names, boxed, bool(configured.floats), _guarded()))

    context: Any = torch._dynamo.optimize(backend, nopython=True)
    if not hasattr(context, "callback"):
        raise CaptureError(SWITCHED_OFF)
    context.callback = configured = _Configured(context.callback, starts)
    fresh = _fresh(function)
    run = context(fresh)

    def call(*given: Any) -> Any:
        if torch._dynamo.eval_frame._stance.stance == "force_eager":
            raise CaptureError(SWITCHED_OFF)
        refused: Refused | None = None
        while True:
            configured.modules, configured.sizes = None, {}
            try:
                return run(*given)
            except Exception as error:  # where Dynamo reads what it has no source of, it fails in ways of its own
                if not isinstance(error, torch._dynamo.exc.TorchDynamoException) and configured.modules is None:
                    raise  # the pipeline's, which runs in here
                if refused is None or configured.further(str(error)):
                    refused = refusal(error, configured.modules, sizes=configured.sizes)
                if not configured.another(str(error)):
                    raise refused from None

    # Dynamo's table from compiled to original code keeps both alive, and with them all that was captured.
    weakref.finalize(call, reset_code, fresh.__code__).atexit = False
    return call


def _guarded() -> Callable[[], list[Any]]:
    """Gives the objects of the guards of the trace under way, which are known when that is over."""
    guards = list(TracingContext.get().guards_context.dynamo_guards)

    def guarded() -> list[Any]:
        seen = [guard.obj_weakref() for guard in guards if isinstance(guard.obj_weakref, weakref.ref)]
        guards.clear()
        return seen

    return guarded


def _fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of its own for each pipe: Dynamo's cache, its limit and what it learns about sizes go by the code; and
    with globals of its own, for among them Dynamo puts what it compiles."""
    assert isinstance(function, FunctionType)
    code, known = function.__code__, function.__globals__
    name = f"{code.co_name}_{next(numbers)}"
    own = {"__name__": function.__module__, "__builtins__": builtins}
    own |= {used: known[used] for used in code.co_names if used in known}
    return FunctionType(code.replace(co_name=name), own, name)


class _Configured:
    """Dynamo's compiler, under our settings. Calls that were captured before do not pass here. `modules`: those in
    which it stopped, from the outermost on; `sizes`: the symbols that it had by then. `floats`: what numpy made of
    plain numbers. `ways`: how else it reads than at first:

      - "deep": also functions that Dynamo passes over because it takes them for Python's or torch's own business; and
        forward may ask for the gradient of a tensor that it made itself
      - "plain": nobody tells the model that it is being compiled, whereupon some leave out more than they should
    """

    def __init__(self, compile: Callable[..., Any], starts: Callable[[], None]) -> None:
        self.starts = starts
        self._torchdynamo_orig_backend = compile  # the name by which Dynamo finds the inner one
        self.ways: set[str] = set()
        self.modules: tuple[int, ...] | None = None
        self.sizes: Sizes = {}
        self.floats: list[float] = []

    def another(self, refusal: str) -> bool:
        """Whether there is another way to read what was refused so. If not, the next call begins with the first."""
        news = [way for way, signs in WAYS.items() if way not in self.ways and any(sign in refusal for sign in signs)]
        self.ways = self.ways | set(news) if news else set()
        return bool(news)

    def further(self, refusal: str) -> bool:
        """Whether this stopped further on than what was refused before: the model raised because it was told that it
        is being compiled, and not any more."""
        return "plain" in self.ways and not any(sign in refusal for sign in WAYS["plain"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.starts()
        # Settings are those of the whole process, so no other thread may compile meanwhile, ours or not.
        with convert_frame.compile_lock, ExitStack() as settings:
            known: dict[str, Any] = {
                key: value for key, value in SETTINGS.items() if hasattr(torch._dynamo.config, key)
            }
            methods = (getattr(logging.Logger, name, None) for name in LOGGING)
            known["ignore_logging_functions"] = {*filter(None, methods), warnings.warn}
            if "deep" in self.ways and hasattr(torch._dynamo.config, "dont_skip_tracing"):
                known["dont_skip_tracing"] = True
            self.floats, contexts = [], Contexts()
            for setting in (
                torch._dynamo.config.patch(known),
                *([_gradients_that_nobody_gets()] if "deep" in self.ways else []),
                *([_not_compiling()] if "plain" in self.ways else []),
                # Else a dimension that happens to equal the batch is taken for it.
                shape_config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
                one_step(),
                composed_in_python(),
                folding(self.floats),
                _hooks_are_ops(),
                _saved_variables(),
                context_variables(contexts),
                _quiet("torch._subclasses.fake_tensor"),  # our error says it better
                _quiet("torch._dynamo.metrics_context"),  # torch 2.11 cannot write down our settings
            ):
                settings.enter_context(setting)
            try:
                result = self._torchdynamo_orig_backend(*args, **kwargs)
            except Exception as error:  # some are Python's own, of checks inside of Dynamo
                self.modules, self.sizes = _stopped(error)
                raise
            if contexts.left:
                raise Refused(None, f"forward sets the context variable {contexts.left[0]!r}", "reset it in the end")
            return result


def _stopped(error: BaseException) -> tuple[tuple[int, ...] | None, Sizes]:
    """The ids of the modules whose forward Dynamo was in, from the outermost on, None if it was not reading; and what
    its symbols are. Only its frames know, and its own door takes those off the error."""
    found: InstructionTranslatorBase | None = None
    trace = error.__traceback__
    while trace is not None:
        reader = trace.tb_frame.f_locals.get("self")
        if isinstance(reader, InstructionTranslatorBase):
            found = reader
        trace = trace.tb_next
    if found is None:
        return None, {}
    known = found.output.shape_env.var_to_sources.items() if found.output.shape_env is not None else ()
    sizes = {str(symbol): _size(sources[0]) for symbol, sources in known if sources}
    return tuple(int(key.partition("@")[0]) for key in found.nn_module_stack), sizes


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _gradients_that_nobody_gets() -> Iterator[None]:
    """Dynamo refuses `h.requires_grad = True`. If h was made in forward and stays there, as where a model wants its
    checkpoints to work while its first layers are frozen, it changes no gradient that anyone sees: here it does
    nothing."""
    kind: Any = getattr(builtin, "SetAttrBuiltinVariable", None)
    if not hasattr(kind, "_call_setattr"):  # as in torch 2.11: the refusal stands
        yield
        return
    refusing = kind._call_setattr

    def setting(self: Any, tx: Any, owner: Any, name: Any, value: Any) -> Any:
        asked = name.is_python_constant() and name.as_python_constant() == "requires_grad"
        made_here = owner.is_tensor() and owner.source is None
        if asked and made_here and value.is_python_constant() and value.as_python_constant() is True:
            owner.requires_grad = True  # for who asks later
            return value
        return refusing(self, tx, owner, name, value)

    with patched(kind, _call_setattr=setting):
        yield


@contextmanager
def _hooks_are_ops() -> Iterator[None]:
    """A hook on a value that forward makes is an op of the graph, as it is from torch 2.13 on. Before, Dynamo makes a
    function of the gradient there: of each micro-batch's, which for a hook that is not linear is another function."""
    if not hasattr(tensor, "_ApplyBackwardHook"):
        yield
        return
    kind: Any = tensor.TensorVariable
    hanging = kind._method_register_hook

    def hang(self: Any, tx: Any, name: str, hook: Any) -> Any:
        if self.source:
            return hanging(self, tx, name, hook)
        tx.output.create_proxy("call_function", register_hook, (self.as_proxy(),), {})
        return variables.RemovableHandleVariable(mutation_type=variables.base.ValueMutationNew())

    with patched(kind, _method_register_hook=hang):
        yield


def register_hook(value: Any) -> None:
    """Stands in a graph for a hook on the value; no graph with one is run."""


@contextmanager
def _saved_variables() -> Iterator[None]:
    """In the backward of an autograd function, `ctx.saved_variables` is `ctx.saved_tensors` by its old name, which
    Dynamo (torch 2.13) does not know: it finds nothing saved there."""
    kind: Any = misc.AutogradFunctionContextVariable
    reading = kind.var_getattr

    def read(self: Any, tx: Any, name: str) -> Any:
        return reading(self, tx, "saved_tensors" if name == "saved_variables" else name)

    with patched(kind, var_getattr=read):
        yield


@contextmanager
def _not_compiling() -> Iterator[None]:
    """`torch.compiler.is_compiling()` is false in forward, by any of its names."""
    answers = tracing_state_functions()
    known = {ask: said for ask, said in answers.items() if ask.__name__ in ("is_compiling", "is_dynamo_compiling")}
    answers.update(dict.fromkeys(known, False))
    try:
        yield
    finally:
        answers.update(known)


def _name(placeholder: fx.Node) -> str | tuple[str, int]:
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    return "" if source is None else _size(source)


def _size(source: Any) -> str | tuple[str, int]:
    """How Dynamo spells where a value comes from: (name, dim) for the size of a tensor."""
    if isinstance(source, TensorPropertySource) and source.prop is TensorProperty.SIZE and source.idx is not None:
        return source.base.name, source.idx
    return str(source.name)


def source_name(placeholder: fx.Node) -> str:
    """Where its value comes from, as Dynamo spells it; "" if it does not say."""
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    return "" if source is None else str(source.name)


def is_boxed(placeholder: fx.Node) -> bool:
    """Whether it is a Python number put into a tensor."""
    argument, value = placeholder.meta.get("grapharg"), placeholder.meta["example_value"]
    return isinstance(value, FakeTensor) and getattr(argument, "is_tensor", True) is False

"""Lets Dynamo trace one program for `model.train()` and `model.eval()`: a module's `training` flag becomes an op of the
graph wherever it only chooses an argument of a dropout.

    F.dropout(x, 0.1, self.training)                 dropout(x, 0.1, training_flag())
    dropout_p=self.p if self.training else 0.0       either(training_flag(), 0.1, 0.0)
    if self.training: ...                            a Python constant: the program is for this mode

What reads the flag as a constant takes it from `value`, so nothing can do so unseen. Such a trace is for one mode, with
Dynamo's guards; else it relies on that all these flags are equal to the model's own.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.nn.functional as F
from torch import fx, nn
from torch._dynamo import symbolic_convert
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch._guards import Source, TracingContext

from fxpipe.capture.twins.twin import Twins
from fxpipe.errors import file_name
from fxpipe.ir.graph.ops import DROPOUTS
from fxpipe.ir.operators.training_mode import ATTENTION, either

from .patched import GETATTR, knows, patched

# Where torch has other parts, each program is for one mode.
KNOWN = knows(
    (UnspecializedNNModuleVariable, GETATTR),
    (InstructionTranslatorBase, "dispatch_table"),
    (ConstantVariable, "as_proxy"),
)
# The places of `p` and `training` in torch's dropouts, and of the probability in attention.
PLACES = {getattr(F, name): {1: "p", 2: "training"} for name in DROPOUTS if hasattr(F, name)}
PLACES |= {getattr(F, ATTENTION): {4: "dropout_p"}}
LOADS = ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_CONST", "LOAD_SMALL_INT", "LOAD_ATTR")
SKIPPED = ("NOP", "CACHE")


def training_flag() -> bool:
    """The model's flag; as all predictions are for training, that is true in a trace."""
    return True


class TrainingFlags:
    """The flags that traces of a model read.

    - `allowed`: whether programs may be for both modes.
    - `relied`: the twins whose flags programs take to be equal to the model's, by their ids.
    - `fixed`: the line that read a flag as a Python constant in the last trace.
    """

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed and KNOWN
        self.relied: dict[int, nn.Module] = {}
        self.fixed = ""
        self._twins: Twins | None = None
        self._news: object = None
        self._output: Any = None
        self._reads: dict[int, tuple[nn.Module, Source]] = {}
        self._constant = self._settled = self._marked = False

    def forget(self) -> None:
        """Forget what was captured."""
        self.relied.clear()
        self._marked = False

    def renew(self, twins: Twins) -> bool:
        """Look at the twins again if something changed. Returns whether flags differ that traces take to be equal."""
        if self._news is twins.news and self._twins is twins:
            return False
        self._twins, self._news = twins, twins.news
        return any(vars(module).get("training") is not self.mode for module in self.relied.values())

    @property
    def mode(self) -> bool:
        """The model's flag."""
        assert self._twins is not None
        return bool(self._twins.root.training)

    def end(self) -> bool:
        """Let programs be for one mode. Returns whether that makes another trace: not all can be done for both."""
        ended = self.allowed and self._marked
        self.allowed = self.allowed and not ended
        return ended

    # In a trace -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A trace begins."""
        self._output, self._reads, self.fixed = None, {}, ""
        self._constant = self._settled = False

    def leave(self) -> None:
        """The trace has ended: what it was about may be freed."""
        self._output, self._reads = None, {}

    def read(self, tx: Any, owner: Any) -> VariableTracker | None:
        """The flag of a module as what may be an op; None if it is a constant, as that of a module that is not in the
        mode of the model."""
        module, twins = owner.value, self._twins
        if self._output is not tx.output:  # Dynamo has restarted the trace
            self.begin()
            self._output = tx.output
        known = twins is not None and twins.original(module) is not module
        plain = owner.source and not hasattr(type(module), "training")
        if not known or not plain or vars(module).get("training") is not self.mode:
            return None
        if tx.output.side_effects.has_pending_mutation_of_attr(owner, "training"):
            return None
        self._reads[id(module)] = module, owner.source
        self._marked = True
        return Flag(self)

    def constant(self) -> None:
        """A flag was read as a constant."""
        if not self._constant:
            assert not self._settled, "a flag was read as a constant after the trace"
            self._constant = True
            frame = TracingContext.extract_stack()[-1]
            self.fixed = f"{file_name(frame.filename)}:{frame.lineno}"

    def op(self) -> Any:
        """An op that gives the flag, in the graph that is being traced; None inside of a graph in a graph."""
        if self._output.current_tracer.parent is not None:
            return None
        return _op(self._output, training_flag, (), True)

    @contextmanager
    def inner(self) -> Iterator[None]:
        """A context in which another trace is taken inside of this one."""
        before = self._output, self._reads, self._constant, self._settled
        self._output, self._reads, self._constant, self._settled = None, {}, False, False
        try:
            yield
        finally:
            self._output, self._reads, self._constant, self._settled = before

    def take(self, one_mode: bool, modules: list[nn.Module]) -> bool:
        """A part of this trace was taken before: for one mode, or with the flags of these modules as ops. Returns
        whether that is right for them now."""
        if any(vars(module).get("training") is not self.mode for module in modules):
            return False
        self._constant = self._constant or one_mode
        self.relied |= {id(module): module for module in modules}
        return True

    def settle(self, graph: fx.Graph) -> tuple[bool, tuple[int, ...]]:
        """The trace is over: let it be for both modes, or for one. Returns which, and the ids of the modules whose
        flags it reads."""
        nodes = [node for node in graph.nodes if node.target in (training_flag, either)]
        whole = any(hasattr(node.target, "piece") for node in graph.nodes)
        self._settled = True
        shared = not self._constant and not whole and all(_only_chooses(node) for node in nodes)
        if shared:
            self.relied |= {key: module for key, (module, _) in self._reads.items() if nodes}
            return True, tuple(self._reads)
        for node in nodes:
            value = self.mode if node.target is training_flag else node.args[1 if self.mode else 2]
            _replace(node, value)
        for node in reversed(nodes):
            graph.erase_node(node)
        for _, source in self._reads.values():
            install_guard(AttrSource(source, "training").make_guard(GuardBuilder.CONSTANT_MATCH))
        return False, tuple(self._reads)


def _op(output: Any, target: Callable[..., Any], args: tuple[Any, ...], value: Any) -> Any:
    proxy = output.create_proxy("call_function", target, args, {})
    proxy.node.meta["example_value"] = value
    return proxy


def _replace(node: fx.Node, value: Any) -> None:
    """Put a literal in place of the node wherever it is an argument."""
    for user in list(node.users):
        args, kwargs = fx.map_arg((user.args, user.kwargs), lambda used: value if used is node else used)
        user.args, user.kwargs = args, kwargs


def _only_chooses(node: fx.Node) -> bool:
    """Whether a node is only an argument that says whether, or how much, is dropped. What draws in evaluation only is
    not: a trace, which is as in training, would not show that it is random."""
    if node.target is either and not node.args[1] and node.args[2]:
        return False
    names = ("training",) if node.target is training_flag else ("p", "dropout_p")
    for user in node.users:
        if user.target is either:
            continue
        places = PLACES.get(user.target)
        if places is None:
            return False
        given = [*((places.get(at), item) for at, item in enumerate(user.args)), *user.kwargs.items()]
        chosen = sum(item is node and name in names for name, item in given)
        uses: list[fx.Node] = []
        fx.map_arg((user.args, user.kwargs), uses.append)
        if chosen != uses.count(node):
            return False
    return True


class Flag(ConstantVariable):
    """The flag of a module, while it is traced."""

    def __init__(self, flags: TrainingFlags, **kwargs: Any) -> None:
        VariableTracker.__init__(self, **kwargs)
        self.flags = flags

    @property
    def value(self) -> Any:
        """The flag as a constant."""
        self.flags.constant()
        return self.flags.mode

    def as_proxy(self) -> Any:
        found = self.flags.op()
        return self.value if found is None else found

    def __repr__(self) -> str:
        return "Flag()"


class Choice(Flag):
    """A number that the flag chooses, while it is traced."""

    def __init__(self, flags: TrainingFlags, yes: float, no: float, **kwargs: Any) -> None:
        super().__init__(flags, **kwargs)
        self.yes, self.no = yes, no

    @property
    def value(self) -> Any:
        self.flags.constant()
        return self.yes if self.flags.mode else self.no

    def as_proxy(self) -> Any:
        flag = self.flags.op()
        if flag is None:
            return self.value
        return _op(self.flags._output, either, (flag, self.yes, self.no), self.yes)


# A conditional expression ---------------------------------------------------------------------------------------------


def _choice(tx: Any, jump: Any, flag: Flag) -> bool:
    """At the jump of `a if flag else b`, where both are plain numbers, push their choice and go on behind it. Returns
    whether this is such an expression; if not, nothing has changed."""
    other = tx.indexof[jump.target]
    one, end = _loads(tx, tx.instruction_pointer)
    last = tx.instructions[end]
    join = tx.indexof[last.target] if last.opname == "JUMP_FORWARD" else None
    two, behind = _loads(tx, other, join)
    returned = last.opname == tx.instructions[behind].opname == "RETURN_VALUE"
    if end + 1 != other or not (returned if join is None else behind == join):
        return False
    numbers = [_number(tx, one), _number(tx, two)]
    if None in numbers:
        return False
    yes, no = numbers if jump.opname.endswith("IF_FALSE") else reversed(numbers)
    same = repr(yes) == repr(no)
    tx.push(ConstantVariable.create(yes) if same else Choice(flag.flags, float(yes), float(no)))  # type: ignore
    tx.instruction_pointer = behind
    return True


def _loads(tx: Any, start: int, stop: int | None = None) -> tuple[list[Any], int]:
    """The instructions from `start` on that load one value, and where they end."""
    found: list[Any] = []
    for at in range(start, len(tx.instructions)):
        instruction = tx.instructions[at]
        name = instruction.opname
        if at == stop or (name not in SKIPPED and not (name in LOADS and (name == "LOAD_ATTR") == bool(found))):
            return found, at
        found += [] if name in SKIPPED else [instruction]
    return found, start


def _number(tx: Any, instructions: list[Any]) -> float | None:
    """The number that is loaded; None if it is something else, or if Python code would run to get it."""
    stack, found = len(tx.stack), None
    for instruction in instructions:
        is_attribute = instruction.opname == "LOAD_ATTR"
        if is_attribute and not _is_plain(tx.stack[-1], instruction.argval):
            break
        if "FAST" in instruction.opname and instruction.argval not in tx.symbolic_locals:
            break
        tx.dispatch_table[instruction.opcode](tx, instruction)
        tx.push(tx.pop().realize() if isinstance(tx.stack[-1], LazyVariableTracker) else tx.pop())
    else:
        top = tx.stack[-1]
        found = top.value if type(top) is ConstantVariable and len(tx.stack) == stack + 1 else None
    del tx.stack[stack:]
    return found if type(found) in (int, float) else None


def _is_plain(owner: Any, name: Any) -> bool:
    """Whether this is an attribute that a module just has."""
    if not isinstance(owner, UnspecializedNNModuleVariable) or not isinstance(name, str):
        return False
    kind: Any = type(owner.value)
    held = vars(owner.value)
    usual = kind.__getattribute__ is object.__getattribute__ and kind.__getattr__ is nn.Module.__getattr__
    return usual and not hasattr(kind, name) and (name in held or name in held["_modules"])


@contextmanager
def training_flags(flags: TrainingFlags | None) -> Iterator[None]:
    """A context in which Dynamo traces flags as ops where it can."""
    if flags is None or not flags.allowed:
        yield
        return
    flags.begin()
    module: Any = UnspecializedNNModuleVariable
    reading = getattr(module, GETATTR)

    def var_getattr(self: Any, tx: Any, name: str) -> Any:
        flag = flags.read(tx, self) if name == "training" else None
        return reading(self, tx, name) if flag is None else flag

    def jumping(jump: Any) -> Any:
        def handle(self: Any, instruction: Any) -> Any:
            top = self.stack[-1]
            if type(top) is Flag and top.flags is flags:
                self.pop()
                if _choice(self, instruction, top):
                    return None
                self.push(top)
            return jump(self, instruction)

        return handle

    with ExitStack() as patches:
        patches.callback(flags.leave)
        patches.enter_context(patched(module, **{GETATTR: var_getattr}))
        for kind in vars(symbolic_convert).values():
            if isinstance(kind, type) and issubclass(kind, InstructionTranslatorBase):
                table = [
                    jumping(handle) if _is_jump(code) and handle is not None else handle
                    for code, handle in enumerate(kind.dispatch_table)
                ]
                patches.enter_context(patched(kind, dispatch_table=table))
        yield


def _is_jump(code: int) -> bool:
    """Whether this is the instruction of an `if` that is not at the end of a loop."""
    name = dis.opname[code]
    return name.startswith("POP_JUMP") and name.endswith(("IF_FALSE", "IF_TRUE")) and "BACKWARD" not in name

"""Traces a stage forward and backward: its ops run once on fake tensors, under autograd, and what torch runs below
autograd is recorded.

    y = linear(x, weight)       forward    t = weight.t(); y = addmm(bias, x, t)
                                backward   dx = mm(dy, t.t()); dweight = mm(dy.t(), x); dbias = dy.sum([0])

Each recorded op of forward belongs to the op of the stage that ran. Autograd numbers its nodes as forward makes them,
so each recorded op of backward belongs to the op of the stage that made the node that runs.

What torch runs depends on the layout of memory: some of its kernels read memory as if it was contiguous, and a copy
is recorded only where it was not; and random numbers are drawn in the order of memory. So what another stage gives has
the order of dimensions here that it has there (`layouts`), all else is contiguous, and both are made so in a run
(`fxpipe/engines/common/generated_backward.py`, `fxpipe/runtime/autograd/gradient_aliases.py`).
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fxpipe.ir.graph.dtypes import DTYPES
from fxpipe.ir.graph.evaluate_graph import within
from fxpipe.ir.graph.graph import Op, Origin, Region, called, map_leaves
from fxpipe.ir.graph.legal_cuts import ENTER_VMAP
from fxpipe.ir.graph.opaque_call import Opaque
from fxpipe.ir.graph.shared_memory_values import known
from fxpipe.ir.graph.value_types import Dim, ScalarType, TensorType, ValueType
from fxpipe.ir.program.program import OWN_DEVICE, Program, RuntimeCall, Stage
from fxpipe.passes.backward.fake_sizes import Sizes, numbers_in
from fxpipe.passes.backward.record_ops import NOWHERE, Recorder, marked_draws
from fxpipe.passes.backward.refused import Refused
from fxpipe.runtime.autograd.contiguous_layout import inverse

Orders = dict[str, tuple[int, ...]]  # of the values that are not contiguous
AS_STRIDED = {"as_strided", "as_strided_scatter", "as_strided_"}


@dataclass
class Piece:
    """What one op of the stage does: itself, with its own regions, and the `ops` that it ran.

    - `results`: the recorded name of the op's result, or, with their places, of the tensors in its result.
    - `grad`: whether a gradient flows through it.
    """

    op: Op
    ops: list[Op]
    results: dict[int | None, str]
    grad: bool


@dataclass
class Trace:
    """A stage, traced.

    - `pieces`: forward, by the op of the stage.
    - `backward`: the recorded ops of backward.
    - `roots`, `takes`, `weights`: as in `Backward`.
    - `wishes`: better names for recorded values.
    - `types`: the types of all recorded values.
    - `memory`: for each value the one that first had its memory, and the bytes of all that memory.
    - `orders`: as of `layouts`, of the stage's results.
    - `scattered`: results that are not dense in memory, such as `x[:, 0]`.
    """

    pieces: list[Piece] = field(default_factory=list)
    backward: list[Op] = field(default_factory=list)
    roots: list[tuple[str, str]] = field(default_factory=list)
    takes: list[tuple[str, str]] = field(default_factory=list)
    weights: list[tuple[str, str]] = field(default_factory=list)
    wishes: dict[str, str] = field(default_factory=dict)
    types: dict[str, ValueType] = field(default_factory=dict)
    memory: dict[str, tuple[str, Dim]] = field(default_factory=dict, compare=False)
    orders: Orders = field(default_factory=dict, compare=False)
    scattered: frozenset[str] = field(default=frozenset(), compare=False)


def trace(
    program: Program, stage: Stage, arriving: Sequence[str], around: tuple[Region, ...], orders: Orders | None = None
) -> Trace:
    """The stage's forward and backward. `arriving`: the results for which a gradient arrives. `around`: autocast where
    the step is called, which is around all ops. `orders`: as of `layouts`. Raises Refused, with the reason."""
    reason = untraceable(program, stage)
    if reason:
        raise Refused(reason)
    try:
        found, sizes = _traced(program, stage, arriving, around, orders or {})
    except Untraceable as error:  # some functions know no symbols
        if not program.graph.sizes:
            raise Refused(str(error)) from error
        try:
            found, sizes = _traced(program, stage, arriving, around, orders or {}, symbolic=False)
        except Untraceable:
            raise Refused(str(error)) from error
    if sizes.specialised:  # some ops may hold for this size only
        again, _ = _traced(program, stage, arriving, around, orders or {}, 1, sizes.symbolic)
        if again != found:
            raise Refused("its ops are not the same for every size")
    conditions = sizes.conditions()
    if conditions:  # what torch asks may be about strides only
        try:
            same = _traced(program, stage, arriving, around, orders or {}, small=True)[0] == found
        except (Untraceable, Refused):
            same = False
        if not same:
            raise Refused(f"its ops depend on sizes: {', '.join(conditions)}")
    return found


def layouts(program: Program, around: tuple[Region, ...]) -> Orders:
    """For each value that a stage gives, and that is not contiguous, its dimensions from the largest stride to the
    smallest. Values of stages that cannot be traced count as contiguous."""
    orders: Orders = {}
    for stage in program.stages:
        try:
            if not untraceable(program, stage):
                orders |= _traced(program, stage, (), around, orders, symbolic=False)[0].orders
        except (Refused, Untraceable):
            continue
    return orders


def untraceable(program: Program, stage: Stage) -> str:
    """Why the stage cannot be traced, as far as its ops tell; "" if they do not."""
    for op in stage.ops:
        if isinstance(op.target, Opaque):
            return f"{op.target} is kept whole, {op.target.because}"
        if isinstance(op.target, RuntimeCall):
            return f"{op.target.name} keeps state in Python"
        if not isinstance(op.target, torch._ops.HigherOrderOperator) and not known(op.target):
            return f"{called(op)} is not an operation of torch, at {op.origin}"
        if called(op) == ENTER_VMAP:
            return f"a vmap, at {op.origin}"
        if called(op) in AS_STRIDED:
            return f"as_strided depends on the layout of memory, at {op.origin}"
    for name in stage.mutates:
        if any(kind.grad for kind in [program.types[name]] if isinstance(kind, TensorType)):
            return f"it writes into {program.state(name).path}, which has a gradient"
    for name in stage.takes:
        if isinstance(kind := program.types[name], ScalarType) and kind.kind != "int":
            return f"it computes with the number {name}"
    return ""


def _traced(
    program: Program,
    stage: Stage,
    arriving: Sequence[str],
    around: tuple[Region, ...],
    orders: Orders,
    turn: int = 0,
    symbolic: bool = True,
    small: bool = False,
) -> tuple[Trace, Sizes]:
    """One trace. `turn`, `symbolic`, `small`: as in `Sizes`. Raises Refused, or Untraceable if torch cannot do it."""
    numbers = numbers_in(value for op in stage.ops for value in (op.args, dict(op.kwargs)))
    shapes = [kind.shape for name in _names(stage) if isinstance(kind := program.types[name], TensorType)]
    named = dict.fromkeys(size.name for size in program.graph.sizes)
    named |= dict.fromkeys(name for name in stage.takes if isinstance(program.types[name], ScalarType))
    try:
        sizes = Sizes(named, numbers | numbers_in(shapes), turn, symbolic, small)
    except ValueError as error:
        raise Refused(str(error)) from None
    recorder = Recorder(sizes, {*program.types, *(f"d{name}" for name in _names(stage))})
    try:
        with _silent():
            return _Tracing(program, stage, sizes, recorder, around, orders).run(arriving), sizes
    except Refused:
        raise
    except Exception as error:  # whatever torch cannot do with fake tensors
        said = str(error).strip().split("\n")[0]
        raise Untraceable(f"{type(error).__name__} while it was traced: {said}") from error


class Untraceable(Exception):
    """Torch cannot run the stage on fake tensors, or not with symbols for sizes."""


@contextmanager
def _silent() -> Iterator[None]:
    """Torch does not log what it cannot do with fake tensors: it is an error here."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _names(stage: Stage) -> tuple[str, ...]:
    return (*stage.takes, *stage.states, *stage.borrows, *(op.name for op in stage.ops))


def _order(value: Any) -> tuple[int, ...]:
    """The dimensions of a tensor from the largest stride to the smallest; () if that is their order."""
    if not isinstance(value, Tensor):
        return ()
    strides = _hints(value.stride())
    found = tuple(sorted(range(value.dim()), key=lambda dim: -strides[dim]))
    return () if found == tuple(range(value.dim())) else found


def _scattered(value: Any) -> bool:
    """Whether there are gaps between the elements of a tensor, in whatever order its dimensions are."""
    if not isinstance(value, Tensor):
        return False
    sizes, dense = _hints(value.shape), 1
    for stride, size in sorted((stride, size) for stride, size in zip(_hints(value.stride()), sizes, strict=True)):
        if size > 1 and stride != dense:
            return True
        dense *= size
    return False


def _hints(numbers: Iterable[Any]) -> list[int]:
    """Sizes or strides as numbers, those of the batch that is traced."""
    return [number.node.hint if isinstance(number, torch.SymInt) else int(number) for number in numbers]


class _Tracing:
    """One trace under way. `values`: the fake value of each name of the stage."""

    def __init__(
        self,
        program: Program,
        stage: Stage,
        sizes: Sizes,
        recorder: Recorder,
        around: tuple[Region, ...],
        orders: Orders,
    ) -> None:
        self.program, self.stage, self.sizes, self.recorder = program, stage, sizes, recorder
        self.around, self.orders = around, orders
        self.device = torch.device("cpu" if stage.device.startswith("cpu") else stage.device)
        self.values: dict[str, Any] = {}
        self.found = Trace()
        self.starts: list[int] = []  # the number of autograd's next node before each op

    def run(self, arriving: Sequence[str]) -> Trace:
        mode = FakeTensorMode(shape_env=self.sizes.env, allow_non_fake_inputs=True)
        with ExitStack() as contexts:
            contexts.enter_context(torch.inference_mode(False))
            contexts.enter_context(torch.enable_grad())
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    contexts.enter_context(torch.autocast(kind, enabled=False))
            contexts.enter_context(torch.autograd.set_multithreading_enabled(False))
            contexts.enter_context(mode)
            self.place()
            for op in self.stage.ops:
                self.forward(op)
            self.found.orders = {name: order for name in self.stage.gives if (order := _order(self.values[name]))}
            self.found.scattered = frozenset(name for name in self.stage.gives if _scattered(self.values[name]))
            self.backward(arriving)
        self.found.types, self.found.memory = self.recorder.types, self.recorder.memory
        return self.found

    def place(self) -> None:
        """Fake values for what the stage takes and holds."""
        for name in (*self.stage.takes, *self.stage.borrows, *self.stage.states):
            kind = self.program.types[name]
            if name in self.sizes.values:
                self.values[name] = self.sizes.values[name]
            elif isinstance(kind, TensorType):
                dtype = getattr(torch, DTYPES[kind.dtype].torch)
                shape, order = self.sizes.shape(kind), self.orders.get(name) or tuple(range(len(kind.shape)))
                made = torch.empty([shape[dim] for dim in order], dtype=dtype, device=self.device)
                if name in self.orders:
                    made = made.permute(inverse(order)).detach()
                self.values[name] = made.requires_grad_(kind.grad)
                self.recorder.hold(made, name)
                self.watch(made, name)
            else:
                self.values[name] = self.program.state(name).value
        self.leaves = {
            name: self.values[name]
            for name in (*self.stage.takes, *self.stage.states, *self.stage.borrows)
            if isinstance(self.values[name], Tensor) and self.values[name].requires_grad
        }

    def watch(self, tensor: Tensor, name: str) -> None:
        """Call the tensor's gradient d and its name."""
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: self.called(grad, f"d{name}"))  # type: ignore[no-untyped-call]

    def called(self, grad: Tensor, wish: str) -> None:
        own = self.recorder.names.get(id(grad))
        if own is not None and own in self.recorder.types and own not in dict(self.found.roots).values():
            self.found.wishes.setdefault(own, wish)

    def forward(self, op: Op) -> None:
        """Run an op, and record what it runs."""
        self.starts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self.recorder.ops, self.recorder.origin = [], lambda: op.origin
        placed = map_leaves((op.args, dict(op.kwargs)), lambda leaf: self.device if leaf is OWN_DEVICE else leaf)
        alone = replace(op, args=placed[0], kwargs=placed[1], regions=(*self.around, *op.regions), draw=None)
        with self.recorder:
            value = within(alone, self.values, lambda number: nullcontext())
        self.values[op.name] = value
        if isinstance(value, torch.SymFloat):
            self.recorder.numbers.setdefault(value.node.expr, op.name)
        ops = self.recorder.ops
        if op.draw is not None:
            ops = marked_draws(ops, self.recorder.drew, op.draw)
        several = isinstance(value, (tuple, list))
        items: dict[int | None, Any] = dict(enumerate(value)) if several else {None: value}
        results = {
            place: self.recorder.names[id(item)]
            for place, item in items.items()
            if isinstance(item, Tensor) and id(item) in self.recorder.names
        }
        grad = any(isinstance(item, Tensor) and item.requires_grad for item in items.values())
        grad = grad or any(isinstance(x := self.values[name], Tensor) and x.requires_grad for name in op.writes)
        self.found.pieces.append(Piece(replace(op, regions=(*self.around, *op.regions)), ops, results, grad))
        if isinstance(value, Tensor):
            self.recorder.hold(value, op.name)
            self.watch(value, op.name)
        elif several and not all(item is None or not isinstance(item, Tensor) or place in results
                                 for place, item in items.items()):  # fmt: skip
            raise Refused(f"{called(op)} returns a nest of tensors, at {op.origin}")
        for name in op.writes:  # later readers of the memory may still say the old name
            written = self.values[name]
            if isinstance(written, Tensor) and written is not value and name not in self.stage.states:
                self.recorder.hold(written, name)

    def backward(self, arriving: Sequence[str]) -> None:
        """Run backward from the gradients of the results, and record what it runs."""
        recorder, outputs, grads = self.recorder, [], []
        graded = [
            name for name in self.stage.gives if isinstance(kind := self.program.types[name], TensorType) and kind.grad
        ]
        for name in graded:
            value = self.values[name]
            if name not in arriving or not value.requires_grad:
                self.found.roots.append((name, ""))
                continue
            tangent = torch.empty(value.shape, dtype=value.dtype, device=value.device)
            gradient, kind = f"d{name}", recorder.type_of(tangent)
            if gradient in self.values or self.program.types.get(gradient, kind) != kind:
                gradient = recorder.fresh(gradient)
            recorder.types[gradient] = kind
            recorder.hold(tangent, gradient)
            self.found.roots.append((name, gradient))
            outputs.append(value)
            grads.append(tangent)
        recorder.ops, recorder.origin = [], self.origin
        found: Sequence[Tensor | None] = [None] * len(self.leaves)
        if outputs and self.leaves:
            with recorder:
                found = torch.autograd.grad(outputs, list(self.leaves.values()), grads, allow_unused=True)
        named = {
            name: "" if grad is None else recorder._name(grad, "backward")
            for name, grad in zip(self.leaves, found, strict=True)
        }
        self.found.backward = recorder.ops
        for name, gradient in named.items():
            if gradient and gradient not in dict(self.found.roots).values():
                self.found.wishes.setdefault(gradient, f"d{name}")
        self.found.takes = [
            (name, named.get(name, ""))
            for name in self.stage.takes
            if isinstance(kind := self.program.types[name], TensorType) and kind.grad
        ]
        self.found.weights = [
            (name, gradient) for name, gradient in named.items() if gradient and name not in self.stage.takes
        ]

    def origin(self) -> Origin:
        """The origin of the op whose node of autograd runs now."""
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        place = bisect_right(self.starts, number) - 1 if 0 <= number < 1 << 62 else -1
        if place >= 0:
            self.last = self.stage.ops[place].origin
        return getattr(self, "last", NOWHERE)

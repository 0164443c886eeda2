"""The captured model: a list of operations, each with its type, its effects and the user's line it came from.

A graph of torch.fx is a mutable linked list with a dict that any code may write. Passes that compare "before" and
"after" need values that cannot change, so capture turns the fx graph into this one: frozen, in static single assignment
(every name is defined once), with explicit facts where fx leaves them implicit:

- an in-place op gives its result a name of its own, and later readers read that name (`writes` tells what it changed);
- regions (`no_grad`, `autocast`) are a mark on each op, not a pair of enter and exit ops, so a cut cannot tear them;
- sizes that depend on the batch are named values, with their own number for every micro-batch.

    UNet(image) -> y                                      b = image.shape[0]
      image            f32[b, 3, 64, 64]
      skip = conv2d(image, down.weight)                   f32[b, 16, 64, 64]   unet.py:12  self.down(image)
      ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

from fxpipe.errors import file_name

from .value_types import ScalarType, ValueType


@dataclass(frozen=True, slots=True)
class Ref:
    """The use of a value by name, wherever an argument may stand."""

    name: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Struct:
    """An object of the user's class `cls` inside a call or an output: a dataclass, a namedtuple, a ModelOutput."""

    cls: type
    fields: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Origin:
    """Where an op comes from: the user's file and line, the text of that line, and the path of the module."""

    file: str
    line: int
    code: str
    module: str

    def __str__(self) -> str:
        return f"{file_name(self.file)}:{self.line}  {self.code}".rstrip() if self.line else ""


@dataclass(frozen=True)
class Region:
    """A context that an op runs in. `kind` is "grad" (arguments: enabled), "autocast" (device type, dtype or None,
    enabled, cache or None) or "cudnn" (enabled, benchmark, deterministic, allow_tf32)."""

    kind: str
    args: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(map(str, self.args))})"


@dataclass(frozen=True)
class Op:
    """One operation: `name = target(*args, **kwargs)`.

    - `target`: a function, or a string: the name of a method of the first argument.
    - `args`, `kwargs`: nests of tuples, lists, dicts and slices, with `Ref` for values; the other leaves are literals.
    - `writes`: the values and states whose memory the op changes.
    - `draw`: for an op that draws random numbers, its number among the random ops of the model, which seeds it.
    """

    name: str
    target: Callable[..., Any] | str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    type: ValueType
    origin: Origin
    regions: tuple[Region, ...] = ()
    writes: tuple[str, ...] = ()
    draw: int | None = None

    @property
    def random(self) -> bool:
        return self.draw is not None

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the values and states in the arguments, in order; one that stands there twice comes twice."""
        return tuple(ref.name for ref in refs((self.args, self.kwargs)))

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Names of the values and states that the op uses, each once, in order of first use."""
        return tuple(dict.fromkeys(self.operands))

    @cached_property
    def first(self) -> str:
        """Name of the first value in the first argument; "" if there is none."""
        return next((ref.name for ref in refs(self.args[:1])), "")

    @cached_property
    def _called(self) -> str:
        return target_name(self.target).lstrip(".")

    @cached_property
    def _op_name(self) -> str:
        return name if (name := self._called).startswith("__") else name.rstrip("_")


@dataclass(frozen=True)
class Input:
    """A tensor or number that the caller passes. `batch_dim` is the dimension that is cut into micro-batches; None:
    every micro-batch gets the whole value. `path` is what the user writes for it: `image`, `batch['ids']`; "" if it is
    computed from the whole batch."""

    name: str
    path: str
    type: ValueType
    batch_dim: int | None


@dataclass(frozen=True)
class Size:
    """A number known from an input's shape: `name = input.shape[dim]`, where `input` is that of one micro-batch."""

    name: str
    input: str
    dim: int


@dataclass(frozen=True)
class State:
    """A tensor or object of the model that lives longer than the call.

    - `path`: the model's own key for a parameter or buffer.
    - `kind`: "parameter", "buffer" or "constant": anything else that the model keeps (a plain tensor attribute, a
      nested function).
    - `aliases`: the model's other keys for the same tensor (tied weights).
    - `value`: the object itself, for a constant.
    - `part`: if not empty, only this region of the tensor: in each dimension the first index and the one after the
      last.
    """

    name: str
    path: str
    kind: str
    type: ValueType
    aliases: tuple[str, ...] = ()
    value: Any = field(default=None, compare=False)
    part: tuple[tuple[int, int], ...] = ()

    @property
    def held(self) -> str:
        """The path under which a stage holds the state: `path`, with the bounds of its `part`.

        >>> State("w", "fc.weight", "parameter", ScalarType("float"), part=((0, 4),)).held
        'fc.weight_0_4'
        """
        return "_".join([self.path, *(str(end) for ends in self.part for end in ends)])


@dataclass(frozen=True)
class Output:
    """A value that the call returns. `batch_dim` is the dimension along which micro-batches are concatenated. If it is
    None, `reduce` is "mean" (weighted by the sizes of micro-batches) or "sum" for a value over the batch, or "same" for
    a value that does not depend on the batch."""

    value: str
    batch_dim: int | None
    reduce: str | None = None


@dataclass(frozen=True)
class Mixed:
    """An op that mixes the samples of a micro-batch.

    - `origin`: its line.
    - `what`: what it does, in words.
    - `outputs`: the outputs that depend on it.
    - `meant`: whether the user said that this is meant.
    """

    origin: Origin
    what: str
    outputs: tuple[str, ...]
    meant: bool


@dataclass(frozen=True)
class Graph:
    """What a model computes, for one kind of call. Check with `check_graph.py`, print with `str`.

    - `call`, `result`: the (args, kwargs) of the call and the returned object, as nests of tuples, lists, dicts and
      `Struct`, with `Ref` for the tensors. Every Ref in `result` is an output's value.
    - `arguments`: the model's names of the arguments that were passed by position.
    - `loss`: the output that a step trains; None for a call.
    - `totals`: a graph that computes, from the inputs of the whole batch, what each micro-batch must know about it,
      such as how many labels count; or None. Its outputs are inputs of this graph, uncut and with an empty path.
    - `epilogue`: a graph that computes, once, from outputs of all micro-batches, joined, what needs the whole batch; or
      None. Its inputs are outputs of this graph, which the call does not return.
    - `mixed`: the ops that mix the samples of a micro-batch, so that outputs are not those of the whole batch.
    - `parts`: values of which outputs are made, with how the user says that they are combined: "mean" or "sum".
    - `conditions`: conditions on sizes and numbers that a call must meet too, as Python, such as `seq > 4`, or UNKNOWN.
    - `checkpointed`: where the model asks torch.utils.checkpoint to recompute, which the plan decides here.
    - `fingerprint`: that of the loss function, which must be the same.
    - `changes`: whether the model changes its arguments, such as a cache, for which capture cares.
    - `layouts`: for inputs and states that backward as code cannot read, or would copy, how they lie in memory.
    """

    model: str
    training: bool
    inputs: tuple[Input, ...]
    sizes: tuple[Size, ...]
    states: tuple[State, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Output, ...]
    call: tuple[Any, Any]
    result: Any
    arguments: tuple[str, ...] = ()
    loss: str | None = None
    totals: Graph | None = None
    epilogue: Graph | None = None
    mixed: tuple[Mixed, ...] = ()
    parts: tuple[tuple[str, str], ...] = ()
    conditions: tuple[str, ...] = ()
    checkpointed: Origin | None = None
    fingerprint: tuple[tuple[str, str], ...] = ()
    changes: bool = False
    layouts: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return show(self)

    @cached_property
    def types(self) -> Mapping[str, ValueType]:
        """The type of every name, also of those in the epilogue."""
        named: dict[str, ValueType] = {size.name: ScalarType("int") for size in self.sizes}
        named |= {item.name: item.type for item in self.inputs}
        named |= {state.name: state.type for state in self.states}
        named |= {op.name: op.type for op in self.ops}
        return named if self.epilogue is None else {**self.epilogue.types, **named}

    @cached_property
    def returned(self) -> tuple[Output, ...]:
        """The values that a call returns, in order: the outputs that no epilogue takes, then those of the epilogue."""
        if self.epilogue is None:
            return self.outputs
        return (*(one for one in self.outputs if one.value not in self.taken), *self.epilogue.outputs)

    @cached_property
    def taken(self) -> frozenset[str]:
        """The outputs that the epilogue takes."""
        return frozenset(() if self.epilogue is None else (item.name for item in self.epilogue.inputs))

    @cached_property
    def trains_epilogue(self) -> bool:
        """Whether the epilogue computes the loss."""
        return self.epilogue is not None and any(output.value == self.loss for output in self.epilogue.outputs)

    @cached_property
    def roots(self) -> frozenset[str]:
        """The outputs with which the backward of the stages begins: the loss, or what the epilogue computes it from."""
        return self.taken if self.trains_epilogue else frozenset(() if self.loss is None else (self.loss,))

    def state(self, name: str) -> State:
        return self._states[name]

    @cached_property
    def _states(self) -> dict[str, State]:
        return {state.name: state for state in self.states}


_LITERALS = frozenset((Ref, bool, int, float, str, type(None)))  # the leaves of most nests, known by their type


def refs(nest: Any) -> Iterator[Ref]:
    """Every `Ref` in a nest of arguments, in order."""
    kind = type(nest)
    if kind is Ref:
        return iter((nest,))
    if kind in _LITERALS:
        return iter(())
    if isinstance(nest, Mapping):
        nest = nest.values()
    elif isinstance(nest, slice):
        nest = (nest.start, nest.stop, nest.step)
    elif isinstance(nest, Struct):
        nest = [value for _, value in nest.fields]
    elif not isinstance(nest, (tuple, list)):
        return iter(())
    return chain.from_iterable(map(refs, nest))


def map_refs(nest: Any, change: Callable[[Ref], Any]) -> Any:
    """The nest with `change(ref)` in place of every `Ref`."""
    return map_leaves(nest, lambda leaf: change(leaf) if isinstance(leaf, Ref) else leaf)


def map_leaves(nest: Any, change: Callable[[Any], Any]) -> Any:
    """The nest with `change(leaf)` in place of every leaf: everything but tuples, lists, dicts, slices and `Struct`.
    The immutable lists of torch.fx become plain ones."""
    if type(nest) in _LITERALS:
        return change(nest)
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(map_leaves(item, change) for item in nest))
    if type(nest) is tuple:
        return tuple(map_leaves(item, change) for item in nest)
    if isinstance(nest, list):
        return [map_leaves(item, change) for item in nest]
    if isinstance(nest, Mapping):
        return {key: map_leaves(item, change) for key, item in nest.items()}
    if isinstance(nest, slice):
        return slice(*(map_leaves(item, change) for item in (nest.start, nest.stop, nest.step)))
    if isinstance(nest, Struct):
        return replace(nest, fields=tuple((name, map_leaves(value, change)) for name, value in nest.fields))
    return change(nest)


def rename(op: Op, names: Mapping[str, str]) -> Op:
    """The op with the `names` changed: in its arguments, its own name and its `writes`."""
    if not any(name in names for name in (op.name, *op.operands, *op.writes)):
        return op
    args, kwargs = map_refs((op.args, dict(op.kwargs)), lambda ref: Ref(names.get(ref.name, ref.name)))
    writes = tuple(names.get(name, name) for name in op.writes)
    return replace(op, name=names.get(op.name, op.name), args=args, kwargs=kwargs, writes=writes)


UNKNOWN = "?"  # a condition on a value without a name


def show(graph: Graph) -> str:
    """The graph as text: one fact per line, with the user's names; without ids and absolute paths, so that it is the
    same on every machine."""
    mode = "train" if graph.training else "eval"
    lines = [f"{graph.model}, {mode}", *(f"  input   {i.name}: {i.type}" + _dim(i.batch_dim) for i in graph.inputs)]
    lines += [f"  size    {s.name} = {s.input}.shape[{s.dim}]" for s in graph.sizes]
    lines += [f"  {s.kind:<9}  {s.name}: {s.type}  {' = '.join((s.held, *s.aliases))}" for s in graph.states]
    lines += [f"  {show_op(op)}" for op in graph.ops]
    lines += [f"  output  {o.value}" + (f" by {o.reduce}" if o.reduce else _dim(o.batch_dim)) for o in graph.outputs]
    lines += [f"  loss    {graph.loss}"] if graph.loss is not None else []
    lines += ["of the whole batch", *show(graph.totals).splitlines()[1:]] if graph.totals is not None else []
    lines += ["on the whole batch", *show(graph.epilogue).splitlines()[1:]] if graph.epilogue is not None else []
    return "\n".join(lines)


def _dim(batch_dim: int | None) -> str:
    return " whole" if batch_dim is None else "" if batch_dim == 0 else f" along {batch_dim}"


def show_op(op: Op) -> str:
    """One op on one line: `h = linear(x, weight): f32[b, 8]  @ net.py:12  self.fc(x)`."""
    args = [*map(show_nest, op.args), *(f"{key}={show_nest(value)}" for key, value in op.kwargs.items())]
    marks = [*map(str, op.regions), *([f"writes {', '.join(op.writes)}"] if op.writes else [])]
    marks += [f"draw {op.draw}"] if op.random else []
    mark = f"  [{'; '.join(marks)}]" if marks else ""
    return f"{op.name} = {target_name(op.target)}({', '.join(args)}): {op.type}{mark}  @ {op.origin}"


def target_name(target: Callable[..., Any] | str) -> str:
    """A short name for what an op calls."""
    return f".{target}" if isinstance(target, str) else str(getattr(target, "__name__", None) or target)


def is_opaque(op: Op) -> bool:
    """Whether the op calls a submodule whole, see `opaque_call.py`."""
    return getattr(op.target, "is_opaque", False) is True


def called(op: Op) -> str:
    """The name of the function or method that an op calls, without a leading dot."""
    return op._called


def op_name(op: Op) -> str:
    """The name as in `called`, without the trailing `_` of an in-place op."""
    return op._op_name


def show_nest(nest: Any) -> str:
    """An argument as text; slices as `a:b`."""
    if isinstance(nest, slice):
        parts = ("" if part is None else show_nest(part) for part in (nest.start, nest.stop))
        return ":".join(parts) + ("" if nest.step is None else f":{show_nest(nest.step)}")
    if isinstance(nest, (tuple, list)):
        inner = ", ".join(map(show_nest, nest))
        return f"[{inner}]" if isinstance(nest, list) else f"({inner}{',' if len(nest) == 1 else ''})"
    if isinstance(nest, Mapping):
        return "{" + ", ".join(f"{key!r}: {show_nest(value)}" for key, value in nest.items()) + "}"
    return repr(nest)

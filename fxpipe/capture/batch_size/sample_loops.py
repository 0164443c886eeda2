"""Loops over the samples of a batch, in a trace: ops that take single samples, do the same with each, and join them.

    each = [self.fc(f).relu() for f in x]        f, f_1 = x[0], x[1]                                    samples
                                                 linear = linear(f, fc.weight);  relu = linear.relu()     the first body
                                                 linear_1 = ...;                 relu_1 = ...             the second
    torch.stack(each)                            stack = stack([relu, relu_1])                            a join

What comes of the samples may be stacked, concatenated, padded to the longest, or added up. So may what is made anew for
each sample and is the same for all, such as `torch.zeros(3)`. Where values of several
samples meet in another way, samples are not treated alike, or ops write into memory of others, there is no loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.capture.tracing.effects.observed_writes import memory
from fxpipe.capture.tracing.effects.op_effects import Step
from fxpipe.ir.graph.graph import target_name
from fxpipe.ir.graph.ops import SPLIT_OPS
from fxpipe.torch_internals.compiling.dynamic_sizes import depends_on_data

CATS, STACKS, PADS = {"cat", "concat", "concatenate"}, {"stack"}, {"pad_sequence"}
SUMS = {"add", "iadd", "add_"}
NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class Sample:
    """What an op takes out of a value.

    - `number`: that of the sample.
    - `whole`: the value with all samples; `dim`: their dimension in it.
    - `kept`: whether this dimension stays, with a size of 1.
    - `rest`: an index into the sample.
    """

    number: int
    whole: fx.Node
    dim: int
    kept: bool = False
    rest: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Join:
    """Where the samples meet: `node` is made of `parts`, the value of each sample in their order, or for each the same.

    - `how`: "stack", "cat" or "sum"; `dim`: along which dimension of the result.
    - `chain`: for a sum, the ops that add one sample after the other; `start`: what they begin with.
    """

    node: fx.Node
    parts: tuple[fx.Node, ...]
    how: str
    dim: int = 0
    chain: tuple[fx.Node, ...] = ()
    start: Any = 0


@dataclass(frozen=True)
class Loops:
    """The loops of a trace.

    - `samples`: the ops that take single samples.
    - `bodies`: for each loop, the ops of the first sample; `before`: the first op that needs what the loop makes.
    - `joins`: where samples meet.
    - `place`: the loop of each op of a sample, and its place in the body.
    - `numbers`: whether samples have numbers or sizes of their own, which their values decide.
    """

    samples: Mapping[fx.Node, Sample]
    bodies: tuple[tuple[fx.Node, ...], ...]
    before: tuple[fx.Node, ...]
    joins: tuple[Join, ...]
    place: Mapping[fx.Node, tuple[int, int]]
    numbers: bool = False


Env = Mapping[fx.Node, Any]


def sample_lines(graph: fx.Graph, env: Env, rows: int) -> frozenset[str]:
    """The user's lines that take single samples out of values with `rows` of them, or join as many values."""
    return frozenset(
        line_of(node)
        for node in graph.nodes
        if _sample(node, env, rows) is not None or len(_joined_parts(node)[0] or ()) == rows
    )


def line_of(node: fx.Node) -> str:
    """The user's line of an op, as torch writes it."""
    return str(node.meta.get("stack_trace"))


def find_loops(
    graph: fx.Graph, env: Env, ran: Mapping[fx.Node, Step], rows: int, lines: frozenset[str]
) -> Loops | None:
    """The loops over samples that are taken in some lines; None if what takes them is no loop."""
    search = _Search(env, ran, rows)
    if not all(search.read(node, lines) for node in graph.nodes) or not search.joins:
        return None
    search.place_all()
    if not all(map(search.alike, search.bodies)) or not all(map(search.joins_alike, search.joins)):
        return None
    order = {node: at for at, node in enumerate(graph.nodes)}
    before: list[fx.Node] = []
    for index, bodies in enumerate(search.bodies):
        uses = [user for node in chain(*bodies) for user in node.users if search.place.get(user, (-1,))[0] != index]
        reads = {read for node in bodies[0] for read in node.all_input_nodes if read not in search.place}
        given = [search.samples[read].whole if read in search.samples else read for read in reads]
        if not uses or max(map(order.__getitem__, given), default=-1) > min(map(order.__getitem__, uses)):
            return None
        before.append(min(uses, key=order.__getitem__))
    firsts = tuple(tuple(bodies[0]) for bodies in search.bodies)
    numbers = any(map(is_decided_by_data, map(env.__getitem__, search.place)))
    return Loops(search.samples, firsts, tuple(before), tuple(search.joins), search.place, numbers)


def _sample(node: fx.Node, env: Env, rows: int) -> Sample | None:
    """How an op takes one of `rows` samples out of a value; None if it does something else."""
    name, args = op_name(node), node.args
    if node.kwargs or len(args) not in (2, 3) or not isinstance(args[0], fx.Node):
        return None
    whole, value = args[0], env.get(args[0])
    if name == "select" and len(args) == 3 and type(args[2]) is int and _size(value, args[1]) == rows:
        return Sample(args[2] % rows, whole, args[1] % value.dim())  # type: ignore[union-attr]
    if name != "getitem" or len(args) != 2:
        return None
    first, *rest = args[1] if isinstance(args[1], tuple) and args[1] else (args[1],)
    if type(first) is not int or any(isinstance(item, fx.Node) for item in rest):
        return None
    if isinstance(value, Tensor):
        return Sample(first % rows, whole, 0, rest=tuple(rest)) if _size(value, 0) == rows else None
    if op_name(whole) not in SPLIT_OPS or not isinstance(value, (tuple, list)) or len(value) != rows or rest:
        return None
    kept = op_name(whole) != "unbind"
    position = 2 if kept else 1  # split(x, size, dim), unbind(x, dim)
    pieces, dim = whole.args[0], whole.args[position] if len(whole.args) > position else whole.kwargs.get("dim", 0)
    if not isinstance(pieces, fx.Node) or _size(env.get(pieces), dim) != rows:
        return None
    return Sample(first % rows, pieces, dim % env[pieces].dim(), kept)


def _joined_parts(node: fx.Node) -> tuple[Sequence[Any] | None, int]:
    """The tensors that an op joins, and the dimension; None if it does something else."""
    name = op_name(node)
    names = ("sequences", "batch_first", "padding_value") if name in PADS else ("tensors", "dim")
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    parts = given.get(names[0])
    dim: Any = given.get("dim", 0) if name not in PADS else 0 if given.get("batch_first") else 1
    known = name in CATS | STACKS | PADS and given.keys() <= {*names} and type(dim) is int
    return (parts, dim) if known and isinstance(parts, (list, tuple)) else (None, 0)


def _size(value: Any, dim: Any) -> Any:
    """The size of a tensor in a dimension; None if it has none there, or if data decides it."""
    inside = isinstance(value, Tensor) and type(dim) is int and -value.dim() <= dim < value.dim()
    return known_shape(value)[dim] if inside else None


def op_name(node: fx.Node) -> str:
    """The name of the function or method that an op calls: `getitem` also for `x.__getitem__`."""
    name = target_name(node.target).lstrip(".")
    return name.strip("_") if name.startswith("__") else name


@dataclass
class _Search:
    """What is known of the ops so far. `sample_of`: the number of the sample that a value is of; `bodies`: for each
    loop the ops of each sample; `chained`: the ops of sums."""

    env: Env
    ran: Mapping[fx.Node, Step]
    rows: int
    sample_of: dict[fx.Node, int] = field(default_factory=dict)
    samples: dict[fx.Node, Sample] = field(default_factory=dict)
    bodies: list[list[list[fx.Node]]] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    chained: set[fx.Node] = field(default_factory=set)
    place: dict[fx.Node, tuple[int, int]] = field(default_factory=dict)
    last: int = -1

    def read(self, node: fx.Node, lines: frozenset[str]) -> bool:
        """Take the next op. Returns whether it fits into loops."""
        sample = _sample(node, self.env, self.rows) if line_of(node) in lines else None
        if sample is not None and sample.whole not in self.sample_of:
            self.samples[node], self.sample_of[node] = sample, sample.number
            return True
        numbers = {self.sample_of[read] for read in node.all_input_nodes if read in self.sample_of}
        if not numbers and line_of(node) in lines and (join := self._join(node)) is not None:
            self.joins.append(join)
        if not numbers or node in self.chained:
            return True
        if len(numbers) > 1 or node.op == "output":
            join = self._sum(node) if op_name(node) in SUMS else self._join(node)
            if join is not None:
                self.joins.append(join)
                self.chained |= {node, *join.chain}
            return join is not None
        number = self.sample_of[node] = numbers.pop()
        if not self.bodies or number < self.last:  # a loop after another
            self.bodies.append([[] for _ in range(self.rows)])
        self.last = number
        self.bodies[-1][number].append(node)
        return True

    def _join(self, node: fx.Node) -> Join | None:
        """How the samples meet in an op that takes a list of tensors; None if that is not known."""
        parts, dim = _joined_parts(node)
        if parts is None or not self._all(parts):
            return None
        value = self.env[parts[0]]
        if any(known_shape(self.env[part]) != known_shape(value) for part in parts) or None in known_shape(value):
            return None
        how = "cat" if op_name(node) in CATS else "stack"
        return Join(node, tuple(parts), how, dim % (value.dim() + (how == "stack")))

    def _all(self, parts: Any) -> bool:
        """Whether these are values of all samples, in their order; or one for each of them, made anew."""
        if len(parts) != self.rows or not all(isinstance(part, fx.Node) for part in parts):
            return False
        numbers = [self.sample_of.get(part) for part in parts]
        anew = len({*parts}) == len(parts) > 1 and {*numbers} == {None}
        return (anew and all(self._same_node(parts[0], part) for part in parts)) or numbers == [*range(self.rows)]

    def _sum(self, node: fx.Node) -> Join | None:
        """How the values of all samples are added up, where the first two of them meet in this op."""
        if not _adds_two(node):
            return None
        links: list[fx.Node] = [node]
        start: Any = 0
        first: Any = node.args[0]
        if self._is_start(first, node.args[1]):
            links.insert(0, first)
            start, first = first.args if first.args[1] in self.sample_of else first.args[::-1]
        parts: list[Any] = [first, node.args[1]]
        while len(parts) < self.rows:
            following = next(iter(links[-1].users)) if len(links[-1].users) == 1 else None
            if following is None or not _adds_two(following) or following.args[0] is not links[-1]:
                return None
            links.append(following)
            parts.append(following.args[1])
        changed = (start if len(links) == len(parts) else first) if op_name(links[0]) != "add" else None
        if isinstance(changed, fx.Node) and len(changed.users) > 1:
            return None  # `total += x[0]` writes into it
        if not all(isinstance(part, fx.Node) for part in parts):
            return None
        return Join(links[-1], tuple(parts), "sum", chain=tuple(links), start=start)

    def _is_start(self, first: Any, second: Any) -> bool:
        """Whether the first sum is that of a value and the first sample's, as in `0 + x[0]`: the second sample's has no
        such op."""
        if not isinstance(first, fx.Node) or first in self.samples or not _adds_two(first):
            return False
        others: list[Any] = [arg for arg in first.args if arg not in self.sample_of]
        alike = (
            isinstance(second, fx.Node)
            and second.target == first.target
            and any(
                arg is other or (not isinstance(arg, fx.Node) and repr(arg) == repr(other))
                for arg in others
                for other in second.args
            )
        )
        return len(others) == 1 and not alike

    def place_all(self) -> None:
        """Find the place of each op in its loop."""
        self.bodies = [
            [[node for node in body if node not in self.chained] for body in bodies] for bodies in self.bodies
        ]
        self.bodies = [bodies for bodies in self.bodies if any(bodies)]
        for index, bodies in enumerate(self.bodies):
            for body in bodies:
                self.place |= {node: (index, at) for at, node in enumerate(body)}

    def alike(self, bodies: list[list[fx.Node]]) -> bool:
        """Whether the ops of a loop treat all samples alike, in one context, and change nothing."""
        first, *others = bodies
        steps = [self.ran.get(node) for node in first]
        plain = all(step is not None and self._keeps_memory(step) for step in steps)
        known = all(isinstance(self.env[node], (Tensor, tuple, list, *NUMBERS)) for node in first)
        whole = any(hasattr(node.target, "piece") or op_name(node).startswith("_vmap") for node in first)
        if not plain or not known or whole or len({step.regions for step in steps if step is not None}) > 1:
            return False
        return all(
            len(body) == len(first) and all(self._same_op(one, other) for one, other in zip(first, body, strict=True))
            for body in others
        )

    def _keeps_memory(self, step: Step) -> bool:
        """Whether an op writes into no memory but its argument's, which nothing else reads: `linear.relu_()`."""
        if not step.written:
            return True
        given = step.node.all_input_nodes[:1]
        own = {address for node in given if node in self.place for address in memory(self.env[node])}
        return own.issuperset(step.written) and all(len(node.users) == 1 for node in given) and bool(step.node.users)

    def joins_alike(self, join: Join) -> bool:
        """Whether a join has the same value of each sample."""
        return self._all(join.parts) and all(self._same_node(join.parts[0], part) for part in join.parts[1:])

    def _same_op(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether two ops do the same, each for its own sample."""
        regions = [self.ran[node].regions if node in self.ran else None for node in (one, other)]
        if (one.op, one.target) != (other.op, other.target) or regions[0] != regions[1]:
            return False
        sizes = [known_shape(x) if isinstance(x := self.env.get(node), Tensor) else () for node in (one, other)]
        return sizes[0] == sizes[1] and self._same((one.args, dict(one.kwargs)), (other.args, dict(other.kwargs)))

    def _same(self, one: Any, other: Any) -> bool:
        """Whether two arguments are the same, each of its own sample."""
        if type(one) is not type(other):
            return False
        if isinstance(one, (tuple, list)):
            return len(one) == len(other) and all(map(self._same, one, other))
        if isinstance(one, dict):
            return one.keys() == other.keys() and all(self._same(one[key], other[key]) for key in one)
        if isinstance(one, slice):
            return self._same((one.start, one.stop, one.step), (other.start, other.stop, other.step))
        return self._same_node(one, other) if isinstance(one, fx.Node) else repr(one) == repr(other)

    def _same_node(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether two values are the same, each of its own sample, or of none."""
        if one in self.samples and other in self.samples:
            return replace(self.samples[one], number=0) == replace(self.samples[other], number=0)
        if one in self.sample_of or other in self.sample_of:
            return one in self.place and self.place[one] == self.place.get(other)
        if one is other:
            return True
        step = self.ran.get(one)  # made anew for each sample, such as torch.arange(3)
        return step is not None and not step.random and not step.written and self._same_op(one, other)


def is_decided_by_data(value: Any) -> bool:
    """Whether a value is a number, or has a size, that the values of tensors decide."""
    return isinstance(value, NUMBERS) or (isinstance(value, Tensor) and None in known_shape(value))


def known_shape(value: Tensor) -> tuple[Any, ...]:
    """The shape, with None for sizes that data decides."""
    return tuple(None if isinstance(size, torch.SymInt) and depends_on_data(size) else size for size in value.shape)


def _adds_two(node: Any) -> bool:
    """Whether an op adds two values, and nothing more."""
    return isinstance(node, fx.Node) and op_name(node) in SUMS and len(node.args) == 2 and not node.kwargs

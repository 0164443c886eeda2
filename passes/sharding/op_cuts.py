"""The ways in which a group of devices may share each op: found by asking the op's rule which dimensions of its result
may be cut, and what a part then reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fxpipe.ir.graph.evaluate_graph import call
from fxpipe.ir.graph.graph import Graph, Op, Ref, map_refs, op_name
from fxpipe.ir.graph.op_arguments import argument
from fxpipe.ir.graph.ops import RESHAPES, SPLIT_OPS
from fxpipe.ir.graph.value_types import ScalarType, TensorType
from fxpipe.ir.operators.group_layout import REPLICATED, Layout, OpCut, boxes, volume
from fxpipe.ir.operators.strategy import Region
from fxpipe.passes.sharding.graph_rewriter import GraphRewriter
from fxpipe.passes.sharding.part_regions import Place, extent
from fxpipe.passes.sharding.rules import rule_of
from fxpipe.passes.sharding.rules.views import INDEXING
from fxpipe.passes.sharding.sharding_rule import Rule

BLOCKS = (1, 2, 3)  # a layer may make keys and values, or queries, keys and values, or two gates
MOST_PIECES = 8  # that a region is divided into along a dimension
Reads = tuple[tuple[str, tuple[tuple[Region, ...], ...]], ...]


def op_cuts(graph: Graph, sizes: Mapping[str, int], degree: int) -> dict[str, tuple[OpCut, ...]]:
    """The ways to compute each op on `degree` devices, the replicated one first. `sizes`: a number for each size. Parts
    are equal, so that a dimension of which `degree` is no divisor stays whole. So does that of the samples, which are
    shared by the replicas of a stage."""
    recorder = _Recorder(graph, sizes)
    known: dict[Any, list[OpCut]] = {}
    found = {}
    for op in graph.ops:
        recorder.follow(op)
        key, names = recorder.signature(op), recorder.inputs(op)
        if key not in known:
            known[key] = [_renamed(cut, names, range(len(names))) for cut in _cuts(recorder, op, degree)]
        found[op.name] = tuple(_renamed(cut, range(len(names)), names) for cut in known[key])
    return found


def _renamed(cut: OpCut, before: Any, after: Any) -> OpCut:
    names = dict(zip(before, after, strict=True))
    return OpCut(cut.layout, tuple((names[name], regions) for name, regions in cut.reads), cut.summed)


def _cuts(b: _Recorder, op: Op, degree: int) -> Iterator[OpCut]:
    """The replicated way, and those in which devices have less work than the whole op."""
    if op_name(op) in SPLIT_OPS:  # a piece reads what is taken apart
        yield OpCut(reads=tuple((name, ((),) * degree) for name in op.reads))
        return
    if op.name not in b.samples or not isinstance(b.captured[op.name], TensorType) or b.touches_state(op):
        yield OpCut()
        return
    rule, shape = rule_of(op), b.shape(op.name)
    yield OpCut(reads=b.reads(op, rule, REPLICATED, degree)) if op_name(op) in INDEXING else OpCut()
    allowed = {dim for dim in rule.cuts(b, op) if dim < len(shape) and not b.is_samples(op.name, dim)}
    for dim in sorted(allowed):
        for blocks in BLOCKS:
            if shape[dim] % (blocks * degree) == 0:
                layout = Layout(dim, blocks)
                yield OpCut(layout, b.reads(op, rule, layout, degree))
    for blocks, reads in _summed(b, op, degree):
        yield OpCut(REPLICATED, reads, blocks)
        for dim in sorted(allowed):
            if shape[dim] % degree == 0:
                yield OpCut(Layout(dim), reads, blocks)


def _summed(b: _Recorder, op: Op, degree: int) -> Iterator[tuple[int, Reads]]:
    """What devices read of a product of which each adds up a part: of its two operands the same part of the dimension
    that is summed over."""
    name = op_name(op)
    if name not in ("linear", "matmul", "bmm"):
        return
    names = ("input", "weight") if name == "linear" else ("input", "mat2" if name == "bmm" else "other")
    x, y = (argument(op, at, one) for at, one in enumerate(names))
    if x == y or min(len(b.shape(x.name)), len(b.shape(y.name))) < 2:
        return
    last = len(b.shape(x.name)) - 1
    other = len(b.shape(y.name)) - (1 if name == "linear" else 2)
    if b.shape(x.name)[last] % degree:
        return
    for blocks in BLOCKS:
        if b.shape(x.name)[last] % (blocks * degree) == 0:
            yield (
                blocks,
                tuple(
                    (one.name, tuple(boxes(Layout(dim, blocks), b.shape(one.name), degree, at) for at in range(degree)))
                    for one, dim in ((x, last), (y, other))
                ),
            )


def batch_symbol(graph: Graph) -> str:
    """The name of the size that is the number of samples; "" if inputs have none."""
    cut = (item for item in graph.inputs if item.batch_dim is not None)
    types = ((item.type, item.batch_dim) for item in cut)
    return next((str(type.shape[dim or 0]) for type, dim in types if isinstance(type, TensorType)), "")


class _Recorder(GraphRewriter):
    """Notes what the parts of an op read, in place of making them."""

    def __init__(self, graph: Graph, sizes: Mapping[str, int]) -> None:
        super().__init__(graph, sizes)
        self.samples = frozenset(item.name for item in graph.inputs if item.batch_dim is not None)
        self.symbol = batch_symbol(graph)
        self.changed = {name for op in graph.ops for name in op.writes if name in self.states}
        self.noted: list[tuple[str, Region, int]] = []

    def follow(self, op: Op) -> None:
        """Note what is known of the op's result before any cut."""
        if isinstance(op.type, ScalarType) and all(name in self.numbers for name in op.reads):
            self.numbers[op.name] = call(op, self.numbers)
        elif self.samples.intersection(op.reads):
            self.samples |= {op.name}
        if op_name(op) in SPLIT_OPS:
            self.rest[op.name] = (op, lambda place: ())

    def is_samples(self, name: str, dim: int) -> bool:
        """Whether a dimension of a tensor is that of the samples."""
        type = self.symbolic[name]
        return isinstance(type, TensorType) and str(type.shape[dim]) == self.symbol

    def touches_state(self, op: Op) -> bool:
        """Whether forward changes a state that the op reads: all devices then do the same."""
        return bool(self.changed.intersection((*op.reads, *op.writes)))

    def gather(self, op: Op, name: str, region: Region, device: int) -> str:
        self.noted.append((name, region, device))
        made = f"read {len(self.noted)}"
        self.types[made] = self.typed(name, extent(region))
        return made

    def reads(self, op: Op, rule: Rule, layout: Layout, degree: int) -> Reads:
        """For each tensor that the op reads, the regions that each device reads if the result has this layout."""
        self.noted.clear()
        self.ops.clear()
        shape = self.shape(op.name)
        for device in range(degree):
            for region in boxes(layout, shape, degree, device):
                self._note(op, rule, region, device, layout.dim or 0)
        names = dict.fromkeys(name for name, _, _ in self.noted)
        return tuple((name, tuple(self._of(name, device) for device in range(degree))) for name in names)

    def _note(self, op: Op, rule: Rule, region: Region, device: int, dim: int) -> None:
        """Note what a region of the result, cut along `dim`, reads. A reshape reads a box around it; where that is
        larger, as for some heads of queries, keys and values, each index of the dimension before it is noted by itself:
        then each reads a box of its own."""
        before = len(self.noted)
        rule.make(self, op, (Place(region, device),))
        outer = next((at for at in range(dim - 1, -1, -1) if region[at][1] - region[at][0] > 1), None)
        if op_name(op) not in RESHAPES or outer is None or region[outer][1] - region[outer][0] > MOST_PIECES:
            return
        if sum(volume(read) for _, read, _ in self.noted[before:]) > volume(region):
            del self.noted[before:]
            for at in range(*region[outer]):
                rule.make(self, op, (Place((*region[:outer], (at, at + 1), *region[outer + 1 :]), device),))

    def _of(self, name: str, device: int) -> tuple[Region, ...]:
        return tuple(dict.fromkeys(region for one, region, where in self.noted if (one, where) == (name, device)))

    def inputs(self, op: Op) -> tuple[str, ...]:
        """What the op reads, and what the tensors are pieces of that it reads."""
        taken = (name for read in op.reads if read in self.rest for name in self.rest[read][0].reads)
        return tuple(dict.fromkeys((*op.reads, *taken)))

    def signature(self, op: Op) -> Any:
        """What the ways to compute an op depend on."""
        names = self.inputs(op)

        def seen(ref: Ref) -> str:
            number, known = names.index(ref.name), self.captured.get(ref.name)
            return f"{number} {known} {self.numbers.get(ref.name)} {ref.name in self.samples}"

        ops = (op, *(self.rest[name][0] for name in op.reads if name in self.rest))
        calls = [(one.target, map_refs((one.args, dict(one.kwargs)), seen), self.captured[one.name]) for one in ops]
        return repr((calls, op.name in self.samples, self.touches_state(op), op.writes != ()))

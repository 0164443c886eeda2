"""A model as planners of whole clusters see it: a line of layers, with what each costs for one micro-batch.

Ops are too many, and cross each other in too many ways, for a search over stages, replicas and devices. A chain has
only the places where a model may be cut. It may come from a profile of ops or from a file.

VGG-19, 25 layers, batch 32
layer        forward  backward  parameters  saved   cut
Conv2d_1_1   3.4 ms   6.8 ms    6.84 kB     384 MB  384 MB
Conv2d_1_2   7.2 ms   14.4 ms   141 kB      384 MB  384 MB
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from math import ceil, log

from tabulate import tabulate

from fxpipe.ir.units import show_bytes, show_seconds

from .kind_times import KindTimes, check_kinds, kind_of


@dataclass(frozen=True, slots=True)
class Layer:
    """The costs of one layer, for `Chain`.

    - `forward`, `backward`: seconds for one micro-batch on one device.
    - `parameters`: bytes.
    - `saved`: bytes that the backward of one micro-batch needs.
    - `cut`: bytes that cross a cut after this layer: all that was made up to here and is used later, each once. The
      gradient that comes back has the same size.
    """

    name: str
    forward: float
    backward: float
    parameters: float = 0
    saved: float = 0
    cut: float = 0


@dataclass(frozen=True)
class Chain:
    """The layers of `model` in order, for `fxpipe.plan`. Print with `str`.

    - `batch`: the samples of the micro-batch that costs are for.
    - `ideal_shares`: whether replicas share a micro-batch evenly however many samples it has, as in papers whose
      profiles know "a micro-batch" and no samples. If not, `batch` is a whole number, and replicas get whole samples.
    - `kinds`: a `fxpipe.ir.plan.kind_times.KindTimes` for each kind of device whose times are not those of `layers`.
    - `forwards`, `backwards`, `parameters`, `saved`: running sums; the forward of a stage of layers a to b - 1 takes
      `forwards[b] - forwards[a]`.
    """

    model: str
    batch: float
    layers: tuple[Layer, ...]
    ideal_shares: bool = False
    kinds: tuple[KindTimes, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))  # of a list, too

    def __str__(self) -> str:
        return show(self)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def samples(self) -> int | None:
        """The samples of a micro-batch that replicas share; None if shares are ideal."""
        return None if self.ideal_shares else int(self.batch)

    def kind_of(self, label: str) -> str:
        """The kind of `kinds` that a device is of; "" if its times are those of `layers`."""
        return kind_of(label, self.kinds)

    def on(self, kind: str) -> Chain:
        """The chain with the times of a kind, and no other kinds."""
        if not self.kinds:
            return self
        return replace(self, layers=self._layers[kind], kinds=())

    @cached_property
    def _layers(self) -> dict[str, tuple[Layer, ...]]:
        found = {"": self.layers}
        for one in self.kinds:
            times = zip(self.layers, one.forwards, one.backwards, strict=True)
            found[one.kind] = tuple(replace(layer, forward=f, backward=b) for layer, f, b in times)
        return found

    @cached_property
    def forwards(self) -> tuple[float, ...]:
        return _sums(layer.forward for layer in self.layers)

    @cached_property
    def backwards(self) -> tuple[float, ...]:
        return _sums(layer.backward for layer in self.layers)

    @cached_property
    def parameters(self) -> tuple[float, ...]:
        return _sums(layer.parameters for layer in self.layers)

    @cached_property
    def saved(self) -> tuple[float, ...]:
        return _sums(layer.saved for layer in self.layers)

    @cached_property
    def cuts(self) -> tuple[float, ...]:
        """The bytes that cross a cut before layer p, for p from 0 to n; nothing crosses the two ends."""
        return (0.0, *(layer.cut for layer in self.layers[:-1]), 0.0)


def _sums(values: Iterator[float]) -> tuple[float, ...]:
    return tuple(accumulate(values, initial=0.0))


def check(chain: Chain) -> None:
    """Raise ValueError for a chain without layers, without whole samples, or with a cost that is negative or not
    finite."""
    if not chain.layers:
        raise ValueError(f"{chain.model} has no layers")
    if not chain.batch > 0:
        raise ValueError(f"the costs of {chain.model} are for {chain.batch} samples; a micro-batch has some")
    if not chain.ideal_shares and chain.batch != int(chain.batch):
        raise ValueError(
            f"the costs of {chain.model} are for {chain.batch} samples; replicas share whole ones: write a whole "
            "number, or ideal_shares=True"
        )
    for layer in chain.layers:
        if not all(0 <= value < float("inf") for value in astuple(layer)[1:]):
            raise ValueError(f"layer {layer.name!r} of {chain.model} has a cost that cannot be: {layer}")
    check_kinds(chain.model, chain.kinds, "layers", len(chain.layers))


def beside(chain: Chain, others: Mapping[str, Chain]) -> Chain:
    """The chain with the times of the same layers on other kinds of devices."""
    kinds = (
        KindTimes(kind, tuple(e.forward for e in one.layers), tuple(e.backward for e in one.layers))
        for kind, one in others.items()
    )
    return replace(chain, kinds=tuple(kinds))


def slower(chain: Chain, by: float) -> Chain:
    """The chain for a device on which every layer takes `by` times as long."""
    layers = (replace(e, forward=e.forward * by, backward=e.backward * by) for e in chain.layers)
    return replace(chain, layers=tuple(layers))


def scaled(chain: Chain, batch: float) -> Chain:
    """The chain for micro-batches of `batch` samples: times and activations are scaled, parameters are not. On a real
    device small micro-batches cost more than that, because they do not fill it.

    >>> scaled(Chain("m", 2, (Layer("a", 4.0, 8.0, 10, 6, 2),)), 1).layers[0]
    Layer(name='a', forward=2.0, backward=4.0, parameters=10, saved=3.0, cut=1.0)
    """
    if not batch > 0:
        raise ValueError(f"a micro-batch of {batch} samples; it has some")
    if batch == chain.batch:
        return chain
    by = batch / chain.batch
    layers = (
        replace(e, forward=e.forward * by, backward=e.backward * by, saved=e.saved * by, cut=e.cut * by)
        for e in chain.layers
    )
    kinds = (
        KindTimes(one.kind, tuple(by * f for f in one.forwards), tuple(by * b for b in one.backwards))
        for one in chain.kinds
    )
    return replace(chain, batch=batch, layers=tuple(layers), kinds=tuple(kinds))


def nearest(chains: Sequence[Chain], batch: float) -> Chain:
    """The chain for micro-batches of `batch` samples, from `chains` of the same layers at other sizes: the nearest by
    ratio, scaled."""
    if not batch > 0:
        raise ValueError(f"a micro-batch of {batch} samples; it has some")
    return scaled(chains[nearest_at(chains, batch)], batch)


def nearest_at(chains: Sequence[Chain], batch: float) -> int:
    """The position of the chain whose size of micro-batch is the nearest by ratio."""
    return min(range(len(chains)), key=lambda at: abs(log(batch / chains[at].batch)))


def for_micro_batches(chains: Sequence[Chain], batch: int, micro_batches: int) -> Chain:
    """The chain for `batch` samples in this many micro-batches, see `nearest`. If they do not divide the samples, the
    engines make the first ones larger by a sample than the others; costs are those of the larger ones."""
    each = batch / micro_batches
    return nearest(chains, each if chains[0].ideal_shares else ceil(each))


def show(chain: Chain) -> str:
    """A table, one layer per line."""
    rows = [
        (
            e.name,
            show_seconds(e.forward),
            show_seconds(e.backward),
            *map(show_bytes, (e.parameters, e.saved, e.cut)),
            *(show_seconds(times[at]) for one in chain.kinds for times in (one.forwards, one.backwards)),
        )
        for at, e in enumerate(chain.layers)
    ]
    more = [f"{way} on {one.kind}" for one in chain.kinds for way in ("forward", "backward")]
    head = f"{chain.model}, {len(chain)} layers, batch {chain.batch:g}{', ideal shares' if chain.ideal_shares else ''}"
    return f"{head}\n" + tabulate(rows, ["layer", *(f.name for f in fields(Layer)[1:]), *more], tablefmt="plain")

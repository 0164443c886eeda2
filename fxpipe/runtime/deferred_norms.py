"""Norms whose running statistics are those of the whole mini-batch (deferred BatchNorm, torchgpipe).

Each micro-batch is normalised by its own mean and variance. But running statistics that are updated once per
micro-batch differ from those of the model on the mini-batch: they decay too fast, from too few samples. So forward adds
up sums, and the end of the run commits them once, with the momentum of one mini-batch.

Sums are stored by the buffer they belong to. A recomputation has scratch buffers, whose sums are never committed. A
norm that a forward calls twice has two sums, which are committed in the order of the calls, as the plain model updates
twice.

Code that calls the kernel of a batch norm itself has the check of `F.batch_norm` here, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from fxpipe.torch_internals.tensor_memory import version_of

COUNTER = "num_batches_tracked"
Call = tuple[int, int]  # the number of a call in a forward, and its number inside of a submodule that is kept whole


class Owner(Protocol):
    """The owner of the norms' buffers: a stage. `mutates`: the paths of the buffers that forward writes."""

    mutates: tuple[str, ...]

    def tensor(self, path: str) -> Tensor: ...


@dataclass
class Sums:
    """The sums of one call of a norm over the micro-batches so far, for each channel.

    - Batch norm: `count` values; `total` and `squares`: the sum and the sum of squares of (value - running mean).
    - Instance norm (`apart`): `count` samples; `total`: the sum of (mean of the sample - running mean); `squares`: the
      sum of their variances.
    - `momentum`: the norm's; None for a cumulative average.
    - `counts`: whether the call adds one to the counter.
    """

    count: int
    total: Tensor
    squares: Tensor
    momentum: float | None
    apart: bool = False
    counts: bool = False

    def add(self, other: Sums) -> None:
        self.count += other.count
        self.total += other.total.to(self.total.device)
        self.squares += other.squares.to(self.squares.device)

    @property
    def variance(self) -> Tensor:
        if self.apart:
            return self.squares / self.count
        return (self.squares - self.total * (self.total / self.count)) / max(1, self.count - 1)


@dataclass
class Pending:
    """The sums that wait for the end of the mini-batch, for one running mean.

    - `running_var`, `batches`: its running variance and counter, or None: tensors in a stage, paths on the way from a
      replica to its stage.
    - `calls`: the sums, by call.
    """

    running_var: Any
    batches: Any
    calls: dict[Call, Sums] = field(default_factory=dict)

    def add(self, call: Call, sums: Sums) -> None:
        if call in self.calls:
            self.calls[call].add(sums)
        else:
            self.calls[call] = sums


@dataclass(frozen=True)
class Seen:
    """The sums and counts of a replica of a stage: `norms` by the path of the running mean, `counts` by the path of the
    counter."""

    norms: Mapping[str, Pending]
    counts: Mapping[str, Mapping[int, Tensor]]


_pending: Any = WeakIdKeyDictionary()  # running mean -> Pending; Any, because torch leaves it untyped
# A counter of a submodule that is kept whole -> its value after each call of a forward, by the number of the call.
_counted: Any = WeakIdKeyDictionary()


def check_several_values(x: Tensor) -> None:
    """Raise the ValueError of `F.batch_norm` in training if each channel of `x`, its dimension 1, has one value."""
    if x.numel() == x.shape[1]:
        F.batch_norm(x, None, None, training=True)


def deferred_batch_norm(
    input: Tensor,
    running_mean: Tensor,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float | None,
    eps: float,
    call: int = 0,
) -> Tensor:
    """Batch norm in training; `commit` updates the running statistics and `num_batches_tracked`. With `momentum` None
    they are the average over all mini-batches counted there. `call`: how many earlier calls in this forward update the
    same running statistics."""
    sums = _batch_sums(input.detach(), running_mean, momentum)
    sums.counts = num_batches_tracked is not None
    _add(running_mean, running_var, num_batches_tracked, (call, 0), sums)
    return F.batch_norm(input, None, None, weight, bias, True, 0.0, eps)


def deferred_instance_norm(
    input: Tensor,
    running_mean: Tensor,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
    call: int = 0,
) -> Tensor:
    """Instance norm in training; `commit` updates the running statistics. `call` as in `deferred_batch_norm`."""
    _add(running_mean, running_var, None, (call, 0), _instance_sums(input.detach(), running_mean, momentum))
    return F.instance_norm(input, None, None, weight, bias, True, 0.0, eps)


def run_deferring(
    run: Any, tensors: Sequence[Tensor], call: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """`run(tensors, args, kwargs)` of a submodule that is kept whole, with all norms in it deferred. `call` as in
    `deferred_batch_norm`.

    The submodule updates copies of its counters, so that each micro-batch starts from the count of the mini-batch: the
    momentum of a cumulative average depends on it. Raises RuntimeError if the submodule changes running statistics
    itself."""
    at = [i for i, name in enumerate(run.names) if name.rpartition(".")[2] == COUNTER]
    given = list(tensors)
    for i in at:
        given[i] = _count_before(tensors[i], call).clone()
    statistics = [(tensors[i], version_of(tensors[i]), name) for i, name in enumerate(run.names) if _is_statistic(name)]
    with Deferring(call, tensors):
        result = run(given, args, kwargs)
    for tensor, version, name in statistics:
        if version_of(tensor) != version:
            raise RuntimeError(
                f"{run} changes {name} itself, once for each micro-batch, which cannot be deferred to the end of the "
                "batch; leave that to F.batch_norm, or compile without deferred_batch_norm"
            )
    for i in at:
        _count(tensors[i], call, given[i])
    return result


def _is_statistic(name: str) -> bool:
    return name.rpartition(".")[2] in ("running_mean", "running_var")


class Deferring(TorchFunctionMode):
    """In this context norms in training leave the update of the running statistics in `tensors` to `commit`."""

    def __init__(self, call: int, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.call, self.known = call, {id(tensor) for tensor in tensors}
        self.calls: dict[int, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = _read(func, args, kwargs or {})
        if found is None:
            return func(*args, **(kwargs or {}))
        x, mean, var, momentum, sums_of_input, normalise = found
        if id(mean) not in self.known:
            raise RuntimeError(
                f"{func.__name__} updates running statistics that are no buffer of the module, and cannot be deferred "
                "to the end of the batch; compile without deferred_batch_norm"
            )
        inner = self.calls[id(mean)] = self.calls.get(id(mean), -1) + 1
        _add(mean, var, None, (self.call, inner), sums_of_input(x.detach(), mean, momentum))
        return normalise()


@contextmanager
def deferring(buffers: Mapping[str, Tensor]) -> Iterator[Callable[[], AbstractContextManager[Any]]]:
    """A context in which a plain model with these buffers, by name, runs a mini-batch. It gives a function; each
    micro-batch runs in a context made by it. At the end the running statistics are those of the mini-batch."""
    counters = {name: x.clone() for name, x in buffers.items() if name.rpartition(".")[2] == COUNTER}

    def micro_batch() -> AbstractContextManager[Any]:
        for name, value in counters.items():
            buffers[name].copy_(value)
        return Deferring(0, list(buffers.values()))

    yield micro_batch
    for tensor in buffers.values():
        pending: Pending | None = _pending.pop(tensor, None)
        if pending is not None:
            _update(tensor, pending)


def commit(stages: Iterable[Owner]) -> None:
    """Update the running statistics of the stages at the end of the mini-batch."""
    for stage in stages:
        for path in stage.mutates:
            tensor = stage.tensor(path)
            pending: Pending | None = _pending.pop(tensor, None)
            if pending is not None:
                _update(tensor, pending)
            counted: dict[int, Tensor] | None = _counted.pop(tensor, None)
            if counted is not None:
                tensor.copy_(counted[max(counted)])


def sums_of(stage: Owner) -> Seen:
    """Take the sums and counts out of a replica of a stage, for `absorb`."""
    tensors = {path: stage.tensor(path) for path in stage.mutates}
    paths = {id(tensor): path for path, tensor in tensors.items()}
    taken = {path: _pending.pop(tensor, None) for path, tensor in tensors.items()}
    counts = {path: _counted.pop(tensor, None) for path, tensor in tensors.items()}
    norms = {
        path: Pending(paths.get(id(one.running_var)), paths.get(id(one.batches)), one.calls)
        for path, one in taken.items()
        if one is not None
    }
    return Seen(norms, {path: count for path, count in counts.items() if count is not None})


def absorb(stage: Owner, more: Seen) -> None:
    """Add the sums and counts of a replica, from samples of the same batch, to the stage's own."""
    for path, seen in more.norms.items():
        var, batches = (None if at is None else stage.tensor(at) for at in (seen.running_var, seen.batches))
        for call, sums in seen.calls.items():
            _add(stage.tensor(path), var, batches, call, sums)
    for path, counted in more.counts.items():
        tensor = stage.tensor(path)
        for number, count in counted.items():
            _count(tensor, number, count.to(tensor.device))


def discard(stages: Iterable[Owner]) -> None:
    """Drop the sums of a mini-batch that has failed."""
    for stage in stages:
        for path in stage.mutates:
            _pending.pop(stage.tensor(path), None)
            _counted.pop(stage.tensor(path), None)


def _add(mean: Tensor, var: Tensor | None, batches: Tensor | None, call: Call, sums: Sums) -> None:
    pending: Pending | None = _pending.get(mean)
    if pending is None:
        pending = _pending[mean] = Pending(var, batches)
    elif pending.batches is None:
        pending.batches = batches
    pending.add(call, sums)


def _count_before(counter: Tensor, call: int) -> Tensor:
    """The value of a counter at the beginning of this call of a forward."""
    counted: dict[int, Tensor] = _counted.get(counter, {})
    return counted[max(before)] if (before := [one for one in counted if one < call]) else counter


def _count(counter: Tensor, call: int, value: Tensor) -> None:
    """Note the value of a counter after this call in one micro-batch. The mini-batch's value is the maximum."""
    counted: dict[int, Tensor] = _counted.setdefault(counter, {})
    counted[call] = torch.maximum(counted[call], value) if call in counted else value


def _batch_sums(x: Tensor, mean: Tensor, momentum: float | None) -> Sums:
    dims = [dim for dim in range(x.dim()) if dim != 1]
    wide = x.to(torch.promote_types(mean.dtype, torch.float32))  # sums of halves overflow
    # Shifted by the running mean, to keep precision if the mean is much larger than the deviation.
    shifted = wide - mean.detach().view([-1 if dim == 1 else 1 for dim in range(x.dim())])
    return Sums(x.numel() // x.shape[1], shifted.sum(dims), shifted.square().sum(dims), momentum)


def _instance_sums(x: Tensor, mean: Tensor, momentum: float | None) -> Sums:
    each = x.to(torch.promote_types(mean.dtype, torch.float32)).flatten(2)
    var, means = torch.var_mean(each, 2)
    return Sums(len(x), (means - mean.detach()).sum(0), var.sum(0), momentum, apart=True)


@torch.no_grad()
def _update(running_mean: Tensor, pending: Pending) -> None:
    """Update once for each call of a forward, in the order of the calls."""
    origin = running_mean.clone()  # the shift of the sums
    for _, sums in sorted(pending.calls.items(), key=itemgetter(0)):
        if sums.counts and pending.batches is not None:
            pending.batches.add_(1)
        factor = sums.momentum
        if factor is None:
            factor = 1.0 if pending.batches is None else 1.0 / float(pending.batches)
        mean = origin + sums.total / sums.count
        running_mean.add_(((mean - running_mean) * factor).to(running_mean.dtype))
        if pending.running_var is not None:
            var = pending.running_var
            var.mul_(1 - factor).add_((sums.variance * factor).to(var.dtype))


# A norm's call in a submodule that is kept whole: input, running mean, running variance, momentum, the function that
# makes the sums, and one that normalises without running statistics.
Read = tuple[Tensor, Tensor, Tensor | None, float | None, Callable[..., Sums], Callable[[], Tensor]]
_NATIVE = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled")
_SIGNATURES = {norm: inspect.signature(norm) for norm in (F.batch_norm, F.instance_norm)}


def _read(norm: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Read | None:
    if norm is torch.batch_norm:
        given, norm = dict(zip(_NATIVE, args, strict=False)) | dict(kwargs), F.batch_norm
    elif norm in _SIGNATURES:
        bound = _SIGNATURES[norm].bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
    else:
        return None
    trains, sums = ("training", _batch_sums) if norm is F.batch_norm else ("use_input_stats", _instance_sums)
    x, mean = given["input"], given["running_mean"]
    if not given[trains] or mean is None:
        return None
    normalise = partial(norm, x, None, None, given["weight"], given["bias"], True, 0.0, given["eps"])
    return x, mean, given["running_var"], given["momentum"], sums, normalise

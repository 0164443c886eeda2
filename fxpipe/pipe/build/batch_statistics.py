"""The warnings about norms that normalise by the statistics of their batch, and about other buffers forward writes.

    y = batch_norm(x, mean, var, w, b, training=True)      of the samples of a micro-batch, not of the batch

A micro-batch has its own mean and variance. So outputs and gradients of the pipe are those of the plain model on each
micro-batch by itself, and running statistics are updated once for each micro-batch. A warning says so once, unless the
user has set `deferred_batch_norm`; `pipe.explain()` always says it. Another buffer that forward writes, such as a
counter, the vectors of `spectral_norm`, or averages of codes, is written by each micro-batch in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxpipe.errors import BatchStatisticsWarning, warn
from fxpipe.ir.graph.graph import Graph, Origin, Ref
from fxpipe.ir.graph.module_parts import used_modules
from fxpipe.ir.graph.opaque_call import Opaque, opaques
from fxpipe.ir.graph.shared_memory_values import memory_of
from fxpipe.ir.once import once
from fxpipe.ir.operators.batch_norm_ops import arguments
from fxpipe.ir.units import count

BATCH_NORMS: Any = nn.BatchNorm1d.__base__  # of SyncBatchNorm too
SCRIPTED = tuple(kind.__name__ for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))
SHOWN = 3  # norms that a message names


@dataclass(frozen=True)
class BatchNorm:
    """A norm that uses the statistics of its batch: its `path` in the model, or the line that calls it."""

    path: str
    origin: Origin

    def __str__(self) -> str:
        return self.path or str(self.origin)


@once
def batch_norms(graph: Graph) -> tuple[BatchNorm, ...]:
    """The norms of a graph that use the statistics of their batch, each once."""
    found: dict[str, BatchNorm] = {}
    paths = {state.name: state.path for state in graph.states}
    for op in graph.ops:
        if isinstance(op.target, Opaque):
            for inside, part in used_modules(op.target.module, op.target.uses):
                path = ".".join(filter(None, (op.target.path, inside)))
                by_batch = getattr(part, "training", False) or getattr(part, "running_mean", None) is None
                if _is_batch_norm(part) and by_batch:
                    found.setdefault(path, BatchNorm(path, op.target.origin))
            continue
        norm = arguments(op)
        if norm is None or norm["training"] is not True:
            continue
        named = next((norm[key] for key in ("running_mean", "weight", "bias") if isinstance(norm[key], Ref)), None)
        path = paths.get(named.name, "").rpartition(".")[0] if named is not None else op.origin.module
        found.setdefault(path or str(op.origin), BatchNorm(path, op.origin))
    return tuple(found.values())


@once
def written_buffers(graph: Graph) -> tuple[str, ...]:
    """The paths of the buffers that forward writes, but for those of batch norms; of submodules kept whole, those that
    runs have shown to be written."""
    root, norms = memory_of(graph), tuple(f"{norm.path}." for norm in batch_norms(graph) if norm.path)
    ops = [op for op in graph.ops if arguments(op) is None and not isinstance(op.target, Opaque)]
    written = {root[name] for op in ops for name in op.writes if name in root}
    found = [state.path for state in graph.states if state.kind == "buffer" and root.get(state.name) in written]
    for opaque in opaques(graph):
        found += (f"{opaque.path}.{name}".lstrip(".") for name in opaque.names if name in opaque.writes)
    return tuple(path for path in dict.fromkeys(found) if not path.startswith(norms))


def _is_batch_norm(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return getattr(module, "original_name", "") in SCRIPTED
    return isinstance(module, BATCH_NORMS)


def tell(norms: Sequence[BatchNorm], batch: int, rows: Sequence[int]) -> None:
    """Warn about norms that use the statistics of micro-batches of `rows` samples, from a batch of `batch` samples."""
    few = f"{rows[0]}" if rows[0] == rows[-1] else f"{rows[-1]} or {rows[0]}"
    warn(
        f"BatchNorm uses the statistics of micro-batches in {_names(norms)}: the mean and variance of {few} samples, "
        f"not those of the batch of {batch}. Outputs, loss and gradients are those of the plain model on each "
        f"micro-batch by itself, and running statistics are updated {len(rows)} times for the batch.\n"
        "deferred_batch_norm=True makes the running statistics those of the whole batch; each micro-batch is still "
        "normalised by its own. For the statistics of the batch write chunks=1, or use a norm that does not depend on "
        "other samples, as GroupNorm.\n"
        "If this is meant, write deferred_batch_norm=False.",
        BatchStatisticsWarning,
    )


def tell_written(paths: Sequence[str], times: int) -> None:
    """Warn about buffers that forward writes, so many times for a batch."""
    warn(
        f"forward writes into {_names(paths)}: each micro-batch does so in turn, {times} times for the batch, and what "
        "forward reads there is what the micro-batches before have left. So outputs, gradients and these buffers may "
        "be others than those of the plain model, which writes once. For one write to a batch, write chunks=1, or "
        "write into them outside of forward, after the step. If this is meant, filter this warning.",
        BatchStatisticsWarning,
    )


def line(norms: Sequence[BatchNorm], deferred: bool, replicas: bool) -> str:
    """The line of `pipe.explain()` about these norms."""
    running = "the whole batch, at its end" if deferred else "each micro-batch, in turn"
    part = "each slice of a micro-batch that a replica has" if replicas else "each micro-batch"
    return (
        f"batch statistics: in {_names(norms)}, {part} is normalised by its own mean and variance; running statistics "
        f"are updated with those of {running} (deferred_batch_norm={deferred})"
    )


def line_of_written(paths: Sequence[str]) -> str:
    """The line of `pipe.explain()` about buffers that forward writes."""
    return f"written buffers: each micro-batch writes into {_names(paths)}, in turn"


def _names(found: Sequence[BatchNorm] | Sequence[str]) -> str:
    names = ", ".join(map(str, found[:SHOWN]))
    what = ("buffer", "buffers") if isinstance(found[0], str) else ("norm", "norms")
    return names if len(found) <= SHOWN else f"{count(len(found), *what)} ({names}, ...)"

"""The ways in which a stage may cut its ops over groups of devices, each with what layers cost in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fxpipe.ir.dataclass_json import at_least

from .layer_chain import Chain, for_micro_batches


@dataclass(frozen=True)
class Way:
    """One way.

    - `tensor_parallel`: over how many devices each op is cut.
    - `chains`: the layers with what each costs on one device of such a group, a `Chain` for each size of micro-batch.
    """

    tensor_parallel: Annotated[int, at_least(1)]
    chains: tuple[Chain, ...]

    def chain(self, batch: int, micro_batches: int) -> Chain:
        """The chain for `batch` samples in this many micro-batches."""
        return for_micro_batches(self.chains, batch, micro_batches)

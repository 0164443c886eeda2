"""Reads layer profiles of the form "dapple-profile/1": JSON, times in milliseconds, bytes as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fxpipe.errors import PlanError
from fxpipe.ir.dataclass_json import parse
from fxpipe.ir.plan.layer_chain import Chain, Layer

SCHEMA = "dapple-profile/1"


def read(path: Path | str, states: bool = False) -> Chain:
    """The chain of layers in a profile. With `states`, that of the authors' own linearisation, whose positions their
    tables name: it has a few layers of no or less than no time, which only running sums take well.

    What a layer saves is not in these files: its output is taken for it.
    """
    try:
        data = parse(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"cannot read the profile {path}: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise PlanError(f"{path} is not a profile of the form {SCHEMA!r}")
    try:
        layers = _states(data["authors_states"]) if states else tuple(map(_layer, data["chain"]))
        return Chain(data["model"], data["profile_batch_size"], layers, ideal_shares=True)  # as in the paper
    except (KeyError, TypeError) as error:
        raise PlanError(f"the profile {path} lacks {error}") from None


def _layer(row: Mapping[str, Any]) -> Layer:
    return Layer(
        row["name"],
        row["fwd_ms"] / 1e3,
        row["bwd_ms"] / 1e3,
        parameters=row["param_bytes"],
        saved=row["output_bytes"],
        cut=row["cut_bytes"],
    )


def _states(rows: Sequence[Mapping[str, Any]]) -> tuple[Layer, ...]:
    """Each state has what all up to it cost together: a layer is the difference of two."""
    start = {"cum_fwd_ms": 0.0, "cum_bwd_ms": 0.0, "cum_param_bytes": 0.0}
    return tuple(
        Layer(
            ", ".join(state["antichain"]),
            (state["cum_fwd_ms"] - before["cum_fwd_ms"]) / 1e3,
            (state["cum_bwd_ms"] - before["cum_bwd_ms"]) / 1e3,
            parameters=state["cum_param_bytes"] - before["cum_param_bytes"],
            saved=state["boundary_bytes"],
            cut=state["boundary_bytes"],
        )
        for before, state in pairwise([start, *rows])
    )

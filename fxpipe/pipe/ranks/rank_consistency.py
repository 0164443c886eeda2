"""Checks that all ranks have the same; if not, every rank raises an error that shows the difference."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from fxpipe.engines.ranks.rank_group import World
from fxpipe.engines.ranks.rendezvous import LEADER
from fxpipe.engines.ranks.step_consensus import describe
from fxpipe.errors import RankError
from fxpipe.pipe.options.compile_options import Options, every_device


def agree(world: World, text: str | None, error: BaseException | None = None) -> None:
    """Raise RankError on every rank if one of them has failed or has another text, with the lines that differ. A rank
    that has failed passes its `error`; there `agree` returns, and the caller must raise the error."""
    heard = world.all_gather_object((digest(text), describe(error) if error is not None else None))
    if error is not None:
        return
    raise_first([failed for _, failed in heard])
    odd = next((rank for rank, (found, _) in enumerate(heard) if found != heard[LEADER][0]), None)
    if odd is not None:
        texts = world.all_gather_object(text)
        one, other = texts[LEADER].splitlines(), texts[odd].splitlines()
        lines = [*difflib.unified_diff(one, other, f"rank {LEADER}", f"rank {odd}", lineterm="", n=1)]
        more = [f"... and {len(lines) - 40} more lines"] if len(lines) > 40 else []
        head = f"ranks {LEADER} and {odd} do not have the same model and plan:"
        raise RankError("\n".join([head, *lines[:40], *more]))


def on_each(collect: Callable[[Any], list[Any]], do: Callable[[], Any]) -> list[Any]:
    """Call `do` on each rank; returns the results by rank. A rank where it fails raises its error, all others
    RankError."""
    found, error = None, None
    try:
        found = do()
    except BaseException as failed:
        error = failed
    heard = collect((found, describe(error)))
    if error is not None:
        raise error
    raise_first([failed for _, failed in heard])
    return [one for one, _ in heard]


def raise_first(failures: Sequence[str | None]) -> None:
    """Raise RankError for the first rank that has failed."""
    for rank, failure in enumerate(failures):
        if failure:
            raise RankError(f"rank {rank}: {failure}")


def digest(value: Any) -> str:
    text = value if isinstance(value, str) else repr(sorted(value.items()) if isinstance(value, Mapping) else value)
    return sha256(text.encode()).hexdigest()


def described(options: Options) -> str:
    """The options that must be the same on every rank, a line each."""
    schedule = options.schedule if isinstance(options.schedule, str) else str(type(options.schedule).__name__)
    recomputed = options.checkpoint if isinstance(options.checkpoint, str) else sorted(options.checkpoint)
    return "\n".join(
        [
            f"devices     {', '.join(every_device(options))}",
            f"replicas    {', '.join(str(1 + len(options.replicas.get(first, ()))) for first in options.devices)}",
            f"chunks      {options.chunks}",
            f"schedule    {schedule}",
            f"checkpoint  {recomputed}",
        ]
    )

"""Cuts that the user chose: a number of blocks for each stage, or modules before which to cut.

They apply to the captured order, exactly and whatever they cost. A cut that would separate ops that must stay together
is an error, not moved elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise

from fxpipe.errors import PlanError, similar
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.graph.legal_cuts import legal_cuts, ties
from fxpipe.ir.graph.module_blocks import Block, blocks

from .balance import Cuts


def begins(cut: str | Sequence[int] | Sequence[str]) -> tuple[str, ...] | None:
    """The modules that begin a stage; None if the cut is of another form. An empty list names none: one stage."""
    names = tuple(one for one in cut if isinstance(one, str))
    return None if isinstance(cut, str) or len(names) < len(cut) else names


def cuts_by_hand(graph: Graph, cut: Sequence[int] | Sequence[str], k: int) -> Cuts:
    """Cuts into k stages, by numbers of blocks or names of modules. Raises PlanError if they do not fit, or a cut is
    illegal."""
    names = begins(cut)
    return cuts_by_blocks(graph, [int(one) for one in cut], k) if names is None else cuts_at(graph, names, k)


def cuts_by_blocks(graph: Graph, counts: Sequence[int], k: int) -> Cuts:
    """Cuts into k stages of `counts` blocks each. Raises PlanError if the counts do not fit, or a cut is illegal."""
    found = blocks(graph)
    asked = f"cut={list(counts)}"
    if len(counts) != k:
        raise PlanError(f"{asked} is for {len(counts)} stages, but there are {k} devices")
    if min(counts) < 1:
        raise PlanError(f"{asked} has a stage without blocks; each needs at least one")
    if sum(counts) != len(found):
        example = f"for example cut={_even(len(found), k)}" if k <= len(found) else f"at most {len(found)} stages"
        raise PlanError(
            f"{asked} adds up to {sum(counts)}, but {graph.model} has {len(found)} blocks ({_some(found)}): {example}"
        )
    starts = [found[at].first for at in accumulate(counts[:-1])]
    return _checked(graph, starts, [f"block {_block_at(found, p).path or graph.model!r}" for p in starts])


def _even(total: int, k: int) -> list[int]:
    return [total // k + (s < total % k) for s in range(k)]


def _some(found: Sequence[Block]) -> str:
    paths = [block.path or "forward" for block in found]
    return ", ".join(paths if len(paths) <= 6 else [*paths[:3], "...", paths[-1]])


def _block_at(found: Sequence[Block], position: int) -> Block:
    return next(block for block in found if block.first == position)


def cuts_at(graph: Graph, paths: Sequence[str], k: int) -> Cuts:
    """Cuts into k stages, before the first op of each module. Raises PlanError if the paths do not fit, or a cut is
    illegal."""
    if len(paths) + 1 != k:
        raise PlanError(f"cut={list(paths)} makes {len(paths) + 1} stages, but there are {k} devices")
    first: dict[str, int] = {}
    for position, op in enumerate(graph.ops):
        for path in accumulate(op.origin.module.split("."), lambda a, b: f"{a}.{b}"):
            first.setdefault(path, position)
    first.pop("", None)
    for path in paths:
        if path not in first:
            raise PlanError(f"cut names {path!r}, which is no module that {graph.model} runs{_close(path, first)}")
    starts = sorted((first[path], path) for path in paths)
    for (p, path), (q, other) in pairwise([(0, "the start"), *starts]):
        if p == q:
            raise PlanError(f"cut: there is no op between {path} and {other}, so a stage would be empty")
    return _checked(graph, [p for p, _ in starts], [path for _, path in starts])


def _close(path: str, known: Collection[str]) -> str:
    close = similar(path, known) or sorted(known)[:3]
    return f"; close to it are {', '.join(close)}" if close else "; it has no modules"


def _checked(graph: Graph, starts: Sequence[int], names: Sequence[str]) -> Cuts:
    """The cuts that the user chose. Raises PlanError, with the ops that must stay together, if one is illegal."""
    legal = legal_cuts(graph)
    for p, name in zip(starts, names, strict=True):
        if not legal[p]:
            tie = next(tie for tie in ties(graph) if tie.first < p <= tie.last)
            near = min((q for q in range(1, len(graph.ops)) if legal[q]), key=lambda q: abs(q - p), default=None)
            instead = f"; the nearest place for a cut is before {graph.ops[near].origin}" if near is not None else ""
            raise PlanError(
                f"no cut can lie before {name}, at {graph.ops[p].origin}: {tie.reason}; "
                f"{graph.ops[tie.first].name} to {graph.ops[tie.last].name} must be in one stage{instead}"
            )
    return (0, *starts, len(graph.ops))

"""The few statements that schedulers are made of."""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.codegen.lines import INDENT, WIDTH, Brackets, Doc, layout, prefix


def assign(targets: Sequence[str], call: Doc, depth: int) -> list[str]:
    """`targets = call`, or the call alone."""
    left = ", ".join(targets)
    if not targets:
        return layout(call, depth)
    # One target stands alone however long it is: in brackets it would be a tuple of one.
    if len(targets) == 1 or len(INDENT * depth + left + " = (") + _opening(call) <= WIDTH:
        return layout(prefix(f"{left} = ", call), depth)
    indent, inner = INDENT * depth, INDENT * (depth + 1)
    first, *rest = layout(prefix(") = ", call), depth)
    return [f"{indent}(", *(f"{inner}{target}," for target in targets), first, *rest]


def _opening(call: Doc) -> int:
    return len(call.head) if isinstance(call, Brackets) else 0


def moved(place: str, target: int, device: str) -> Brackets:
    """The tensor copied to the target's device. A GPU's stream waits for the copy; the CPU must be made to."""
    at_once = ("non_blocking=True",) if device != "cpu" else ()
    return Brackets(f"{place}.to(", (f"self.stages[{target}].device", *at_once), ")")


def delete(places: Sequence[str], depth: int, comment: str = "") -> list[str]:
    if not places:
        return []
    lines = layout(Brackets("del ", tuple(places), "", "bare"), depth)
    return [lines[0] + comment] if len(lines) == 1 and len(lines[0] + comment) <= WIDTH else lines

"""What a stage costs, in a line of its file's header."""

from __future__ import annotations

from fxpipe.ir.plan.plan import StagePlan
from fxpipe.ir.plan.profile import Profile, total
from fxpipe.ir.program.kept_bytes import KeptBytes, size
from fxpipe.ir.units import show_bytes, show_seconds


def note(
    profile: Profile, stage: StagePlan, exact: KeptBytes | None = None, memory: tuple[int, int] | None = None
) -> str:
    """What the ops of a stage cost on its first device, for the header of its file. `exact`: what it keeps, where that
    is known exactly; `memory`: what its device needs, and its limit, if recomputation was chosen by these."""
    if memory is not None:
        need, limit = memory
        chosen = f"chosen by memory: {stage.device} needs {need:,} of {limit:,} bytes"
        return f"{chosen}; {note(profile, stage, exact)}"
    on_device = profile.on(stage.device)
    cost = total([on_device[op] for op in stage.ops])
    times = f"forward {show_seconds(cost.forward)}, backward {show_seconds(cost.backward)}"
    if exact is None:
        return f"{times}, keeps {show_bytes(cost.saved)} ({profile.source}, b = {profile.batch})"
    kept = f"keeps {size(exact.saved):,} bytes (exact, b = {profile.batch})"
    return f"{times} ({profile.source}, b = {profile.batch}); {kept}"

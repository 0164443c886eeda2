"""What `pipe.diagnose().replan()` returns: the plan that is fastest with the measured times of the stages.

a step is predicted to take 24 ms, and 33 ms with the plan that ran, which took 34 ms
Net: 2 stages, 4 micro-batches, 1f1b
  stage 0 on cpu:0: 12 ops, linear .. relu_5, recompute never
  stage 1 on cpu:1: 4 ops, linear_6 .. loss, recompute never
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fxpipe.ir.plan.plan import Plan
from fxpipe.ir.plan.profile import Profile
from fxpipe.ir.units import show_seconds


@dataclass(frozen=True)
class Replanned:
    """A plan made from measured times, for `fxpipe.compile(model, plan=...)`. Print with `str`.

    - `plan`: the plan; the one that ran, if no other is predicted to be faster.
    - `seconds`: the predicted time of a step with it.
    - `before`: the predicted time of a step with the plan that ran, from the same measured times, in seconds.
    - `measured`: the seconds of the step that ran, from its first action to its last; `TimeSplit.seconds` also has the
      host's work before and after.
    - `profile`: the measured times, by op.
    - `text`: the plan as the text of a JSON file, as `save` writes it.
    """

    plan: Plan
    seconds: float
    before: float
    measured: float
    profile: Profile
    text: str = field(repr=False)

    @property
    def faster(self) -> bool:
        """Whether a faster plan was found; if not, the plan is the one that ran."""
        return self.seconds < self.before

    def __str__(self) -> str:
        before, measured = show_seconds(self.before), show_seconds(self.measured)
        if self.faster:
            head = (
                f"a step is predicted to take {show_seconds(self.seconds)}, and {before} with the plan that ran, which "
                f"took {measured}"
            )
        else:
            head = f"no other cut is predicted to be faster than the plan that ran: {before}; it took {measured}"
        return f"{head}\n{self.plan}"

    __repr__ = __str__  # what a notebook's cell or the interpreter shows

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file, for `fxpipe.compile(model, plan=path)`."""
        Path(path).write_text(self.text, encoding="utf-8")

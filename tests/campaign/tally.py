"""What a campaign has seen, and its table."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from .setting import Setting
from .trial import Outcome

ROWS = {
    "models": "models captured",
    "none": "models whose plain form fails, or nothing of which was compared",
    "call": "compared calls",
    "eval": "compared calls of eval mode",
    "infer": "compared calls without gradients",
    "step": "compared steps",
    "ranks": "compared steps over two ranks",
    "fault": "faults, each with a right run after it",
    "partly whole": "runs of which some values are those of the whole batch: nothing to compare with",
    "own error": "errors of the model's own, the same from the pipe",
    "option": "options that make no sense for the model",
    "refused": "refusals that name a line",
    "wrong": "wrong",
    "no line": "refusals that name no line",
    "internal": "internal errors",
    "hang": "hangs",
    "died": "processes that died",
    "seconds": "seconds",
}
BAD = ("wrong", "no line", "internal", "hang", "died")


@dataclass
class Tally:
    """Counts by row, refusals by reason with the model where each was seen first, and pipes by what was asked of
    them."""

    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    seen: dict[str, int] = field(default_factory=dict)
    pipes: Counter[str] = field(default_factory=Counter)

    def outcome(self, index: int, found: Outcome) -> None:
        """Count one run. A fault is three runs: two are compared, one fails."""
        if found.what in ("same", "fault"):
            what = found.run.what.removeprefix("faulty ")
            self.counts[what] += 2 if found.run.what != what else 1
        if found.what != "same":
            self.counts[found.what] += 1
        if found.what in ("refused", "option", "no line"):
            reason = f"{found.what}: {gist(found.text)}"
            self.reasons[reason] += 1
            self.seen.setdefault(reason, index)

    def settings(self, settings: tuple[Setting, ...]) -> None:
        for setting in settings:
            self.pipes[setting.kind] += 1
            schedule = setting.options.get("schedule", "gpipe")
            self.pipes["random order" if isinstance(schedule, int) else schedule] += setting.step
            self.pipes["cut at modules"] += isinstance(setting.options.get("cut"), list)

    @property
    def bad(self) -> int:
        return sum(self.counts[row] for row in BAD)

    @property
    def compared(self) -> int:
        return sum(self.counts[row] for row in ("call", "eval", "infer", "step", "ranks"))

    def table(self) -> str:
        lines = [f"{self.counts[row]:8,}  {text}" for row, text in ROWS.items()]
        lines.insert(7, f"{self.compared:8,}  compared in all")
        lines += ["", "refusals by reason, each with the first model that had it"]
        lines += [f"{count:8,}  {reason}  [{self.seen[reason]}]" for reason, count in self.reasons.most_common()]
        lines += ["", "pipes by what was asked of them"]
        lines += [f"{count:8,}  {kind}" for kind, count in self.pipes.most_common()]
        return "\n".join(lines)


def gist(text: str) -> str:
    """A message without its names and numbers."""
    text = re.sub(r"\S*\.py:\d+", "FILE", text)
    text = re.sub(r"'[^']*'|\b[vmq]\d+\w*|\b\w*\d[\w.]*", "_", text)
    lines = [line.strip().removeprefix("CaptureError: FILE") for line in text.splitlines()]
    return " | ".join(line for line in lines if line)[:240]

"""Model number `index` of a campaign: drawn, made, tried; what comes of it is sent as it happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from . import recipe, setting, trial
from .ranks import Ranks
from .recipe import Recipe
from .setting import Setting
from .subject import load

ATTEMPTS = 4  # to make a model that runs: those that write what backward needs do not


@dataclass(frozen=True)
class Subject:
    """All that is tried of a model. `half`: in float32, under autocast."""

    recipe: Recipe
    settings: tuple[Setting, ...]
    half: bool = False


def drawn(seed: int, index: int, folder: Path, *, ranks: float = 0.06) -> Subject:
    """Model number `index` of the campaign `seed`, the same on each machine."""
    rng = Random(f"{seed} {index}")
    made, half = recipe.drawn(rng.randrange(1 << 40)), rng.random() < 0.1
    module = load(written(made, folder, f"drawn{index}"))
    flags, modules = frozenset(module.FLAGS), [name for name, _ in module.Random().named_children()]
    return Subject(made, tuple(setting.drawn(rng, flags, modules, ranks=ranks)), half and "random" not in flags)


def written(made: Recipe, folder: Path, name: str) -> Path:
    path = folder / f"{name}.py"
    path.write_text(recipe.render(made))
    return path


def tried(
    subject: Subject, folder: Path, name: str, ranks: Ranks, tell: Callable[[trial.Outcome], Any]
) -> Subject | None:
    """The subject, as it was tried: where the plain model fails, without what is risky, and then in float64; None where
    nothing of it runs."""
    for attempt in range(ATTEMPTS):
        try:
            for outcome in trial.trial(
                written(subject.recipe, folder, f"{name}_{attempt}"), subject.settings, subject.half, ranks
            ):
                tell(outcome)
            return subject
        except trial.NotAModel:
            pieces = tuple((name, seed) for name, seed in subject.recipe.pieces if not recipe.PIECES[name].risky)
            calm = replace(subject.recipe, pieces=pieces)
            if subject.half:
                subject = replace(subject, half=False)
            elif calm != subject.recipe:
                subject = replace(subject, recipe=calm)
            else:
                return None
    return None

"""What an error says about an argument that is no option: the option that was meant, or the function that has it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import SequenceMatcher

from fxpipe.errors import PlanError, nearest

from .compile_table import COMPILE
from .option_table import LOAD, PLAN, PROFILE, SEARCH, STEP

# What others call an option, in order: the first that a function has is meant.
OTHER_NAMES = {
    ("microbatches", "micro_batches", "num_microbatches", "n_microbatches", "num_chunks"): ("chunks", "micro_batches"),
    ("batch", "global_batch_size"): ("batch_size",),
    ("strategy",): ("plan", "planner"),
    ("balance", "split_at", "split_spec", "split_points"): ("cut",),
    ("checkpointing", "recompute", "activation_checkpointing"): ("checkpoint", "recompute"),
    ("stages", "num_stages", "workers", "gpus"): ("devices",),
}
FUNCTIONS: dict[str, Collection[str]] = {
    "fxpipe.compile": COMPILE.keys(),
    "fxpipe.plan": PLAN.keys(),
    "fxpipe.search": SEARCH.keys(),
    "fxpipe.profile": PROFILE.keys(),
    "fxpipe.load": LOAD.keys(),
    "pipe.step": STEP.keys() - {"rounds"} | {"target"},
    "pipe.rehearse": {"rounds"},
}
MISSPELT = 0.8  # names that are as similar as this differ by a letter or two
WORDS = 0.75  # and so do words


def refuse_unknown(function: str, unknown: Iterable[str], known: Collection[str]) -> None:
    """Raise PlanError for the first unknown argument, with the option that is meant, or the function that has it."""
    for name in unknown:
        raise PlanError(f"{function} has no option {name!r}{_meant(name, known)}")


def _meant(name: str, known: Collection[str]) -> str:
    """The end of the error.

    >>> _meant("chunk", COMPILE), _meant("balance", COMPILE), _meant("all_reduce", COMPILE)
    ("; did you mean 'chunks'?", "; did you mean 'cut'?", '; that is an option of fxpipe.plan')
    """
    near = nearest(name, known)
    if near is not None and _alike(name, near) >= MISSPELT:
        return f"; did you mean {near!r}?"
    for names, options in OTHER_NAMES.items():
        if name in names and (here := [option for option in options if option in known]):
            return f"; did you mean {here[0]!r}?"
    if elsewhere := [other for other, options in FUNCTIONS.items() if name in options]:
        return f"; that is an option of {elsewhere[0]}"
    if near is not None and any(_alike(a, b) >= WORDS for a in name.split("_") for b in near.split("_")):
        return f"; did you mean {near!r}?"
    return "; it has " + ", ".join(known)


def _alike(one: str, other: str) -> float:
    """How similar two texts are, from 0 to 1."""
    return SequenceMatcher(None, one.lower(), other.lower()).ratio()

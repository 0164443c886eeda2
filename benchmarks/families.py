"""Which models of transformers a pipe trains with exactly their own gradients: every class of each task, small.

    pip install transformers pillow scipy
    python -m benchmarks.families --tasks detection ctc --chunks 1 2
    python -m benchmarks.families llama bert mixtral --out found.json

Each model is built with a small config, in double precision, and makes one step by itself and one as a pipe of two
stages, in one micro-batch and in two. The loss and all gradients are compared:

- right: they are the same. Of a model that computes some of it in single precision itself, up to that precision;
- mixes: they are those of each micro-batch, as a warning says, because the model mixes samples;
- wrong: they are others;
- refused: an error of fxpipe says what it cannot do;
- error: any other error, or a crash;
- hang: no answer within `--timeout` seconds;
- plain fails: the model itself cannot be built small, or does not train. These are not counted.

Models that draw random numbers in training are compared as in evaluation; those that draw them even then, with numbers
that do not change, and in one micro-batch only. A model that cannot be trained in double precision is compared in
single. Models run in a process of their own, which is started again after a crash, after a hang, and now and then.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch, in the other process, too: OpenMP spins

from tabulate import tabulate

from benchmarks.family_steps import ERROR, HANG, PLAIN, RESULTS, RIGHT, Family, Found, serve
from benchmarks.tables import show

MAPPINGS = {
    "detection": ("OBJECT_DETECTION",),
    "ctc": ("CTC",),
    "depth": ("DEPTH_ESTIMATION",),
    "segmentation": (
        "SEMANTIC_SEGMENTATION", "IMAGE_SEGMENTATION", "UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION"
    ),
    "series": ("TIME_SERIES_PREDICTION",),
    "vision-language": ("IMAGE_TEXT_TO_TEXT",),
    "seq2seq": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "masked": ("MASKED_LM",),
    "causal": ("CAUSAL_LM",),
    "classification": ("IMAGE_CLASSIFICATION",),
}  # fmt: skip
SERIES = {  # in no mapping of transformers
    "autoformer": "AutoformerForPrediction", "informer": "InformerForPrediction", "patchtst": "PatchTSTForPrediction",
    "patchtsmixer": "PatchTSMixerForPrediction", "time_series_transformer": "TimeSeriesTransformerForPrediction",
}  # fmt: skip
EACH = 20  # models, and a new process


def families(tasks: Sequence[str], names: Sequence[str]) -> list[Family]:
    """One class for each type of model and task; a class that several types share is taken once for a task."""
    from transformers.models.auto import modeling_auto

    found: dict[tuple[str, str], Family] = {}
    for task in tasks:
        for mapping in MAPPINGS[task]:
            kinds = dict(getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES"))
            for kind, classes in (kinds | (SERIES if task == "series" else {})).items():
                name = classes if isinstance(classes, str) else classes[0]
                if not names or kind in names or name in names:
                    found.setdefault((task, name), Family(task, kind, name))
    return list(found.values())


class Worker:
    """The process that runs the models, started when there is something to ask."""

    def __init__(self, counts: Sequence[int], limit: float) -> None:
        self.counts, self.limit, self.asked = counts, limit, 0
        self.process: Any = None

    def results(self, family: Family) -> Iterator[Found]:
        """What the process answers; after a crash or a hang, what a new one answers for the rest."""
        done: list[int] = []
        while left := [one for one in (0, *self.counts) if one not in done]:
            for found in self._answers(family, done):
                if found.chunks in left:
                    done.append(found.chunks)
                    left.remove(found.chunks)
                    yield found
            if not left or self.whole:
                return
            crashed = not self.process.is_alive()
            self.stop()
            result, reason = (ERROR, "the process crashed") if crashed else (HANG, f"no answer in {self.limit:.0f} s")
            done.append(left[0])
            plain = left[0] == 0
            yield Found(
                **asdict(family), chunks=left[0], result=PLAIN if plain else result, reason=reason, seconds=self.limit
            )
            if plain:
                return

    def _answers(self, family: Family, done: Sequence[int]) -> Iterator[Found]:
        if self.process is None or self.asked >= EACH:
            self.stop()
            self._start()
        self.asked += 1
        self.whole = False  # whether all has been answered
        try:
            self.connection.send((family, done))
            while self.connection.poll(self.limit + (60 if self.asked == 1 else 0)):
                found = self.connection.recv()
                if found is None:
                    self.whole = True
                    return
                yield found
        except (EOFError, OSError):
            self.process.join(10)

    def _start(self) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, self.counts), daemon=True)
        self.process.start()
        theirs.close()  # so that a process that dies ends what we read
        self.asked = 0

    def stop(self) -> None:
        if self.process is not None:
            self.connection.close()
            self.process.kill()
            self.process.join()
            self.process = None


def rows(worker: Worker, chosen: Sequence[Family], file: Path | None, kept: list[Found]) -> Iterator[list[Any]]:
    """The rows of the table, as they come; all that is found is kept, and written after each family."""
    for family in chosen:
        for found in worker.results(family):
            kept.append(found)
            if found.chunks or found.result == PLAIN:
                said = found.reason or found.notes
                coded = found.stages and found.stages - len(found.autograd)
                yield [
                    found.task, found.kind, found.chunks, found.result, found.stages, coded, found.seconds, said[:100]
                ]  # fmt: skip
        if file is not None:
            file.write_text(json.dumps([asdict(one) for one in kept], indent=1))


def counted(kept: Sequence[Found]) -> str:
    """How many families of each task came out how."""
    lines = []
    for task in dict.fromkeys(one.task for one in kept):
        own = [one for one in kept if one.task == task]
        fails = sum(one.result == PLAIN for one in own)
        for chunks in sorted({one.chunks for one in own if one.chunks}):
            count = Counter(one.result for one in own if one.chunks == chunks)
            lines.append([task, chunks, *(count[result] for result in RESULTS[:-1]), fails])
    return tabulate(lines, ("task", "chunks", *RESULTS))


def reasons(kept: Sequence[Found]) -> str:
    """What came out neither right nor as the plain model's own failure, by its reason."""
    bad: dict[tuple[str, str], list[str]] = {}
    for one in kept:
        if one.result not in (RIGHT, PLAIN):
            bad.setdefault((one.result, one.reason), []).append(f"{one.kind} ({one.task}, {one.chunks})")
    return "\n".join(f"{result}: {reason}\n    {', '.join(who)}" for (result, reason), who in sorted(bad.items()))


def by_autograd(kept: Sequence[Found]) -> str:
    """How many stages have a backward as code, and why others have none, with the families that have such.

    >>> print(by_autograd([Found("ctc", "a", "A", 1, "right", stages=2, autograd=["a vmap, at a.py:3"])]))
    backward as code in 1 of 2 stages, 50.0%
    autograd: a vmap
        a (ctc, 1)
    """
    count, why = sum(one.stages or 0 for one in kept), dict[str, list[str]]()
    for one in kept:
        for reason in dict.fromkeys(reason.partition(", at ")[0] for reason in one.autograd):
            why.setdefault(reason, []).append(f"{one.kind} ({one.task}, {one.chunks})")
    coded = count - sum(len(one.autograd) for one in kept)
    lines = [f"backward as code in {coded} of {count} stages, {coded / max(1, count):.1%}"]
    return "\n".join([*lines, *(f"autograd: {reason}\n    {', '.join(who)}" for reason, who in sorted(why.items()))])


def summary(kept: Sequence[Found]) -> str:
    """
    >>> summary([Found("ctc", "a", "A", 1, "right"), Found("ctc", "b", "B", 1, "wrong")])
    'chunks=1: 1 of 2 right'
    """
    return "; ".join(
        f"chunks={chunks}: {sum(one.result == RIGHT for one in own)} of {len(own)} right"
        for chunks in sorted({one.chunks for one in kept if one.chunks})
        if (own := [one for one in kept if one.chunks == chunks])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Which models of transformers a pipe trains as they train themselves.")
    parser.add_argument("names", nargs="*", help="types of models, such as llama, or classes; all, if none")
    parser.add_argument("--tasks", nargs="+", default=list(MAPPINGS), choices=list(MAPPINGS), metavar="TASK")
    parser.add_argument("--chunks", type=int, nargs="*", default=[1, 2], help="none: only the plain models")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for each answer")
    parser.add_argument(
        "--out", type=Path, help="a file for all results, as JSON, written as they come; what is in it is not run again"
    )
    options = parser.parse_args()
    worker = Worker(options.chunks, options.timeout)
    kept = [Found(**one) for one in json.loads(options.out.read_text())] if options.out and options.out.exists() else []
    heads = ("task", "model", "chunks", "result", "stages", "by code", "seconds", "")
    try:
        done = {(one.task, one.name) for one in kept}
        chosen = [one for one in families(options.tasks, options.names) if (one.task, one.name) not in done]
        show("", heads, rows(worker, chosen, options.out, kept))
    finally:
        worker.stop()
    print(reasons(kept), by_autograd(kept), counted(kept), summary(kept), sep="\n\n")


if __name__ == "__main__":
    main()

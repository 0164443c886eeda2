"""Steps over two processes: the ranks load the model by themselves, and compare what they have together."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fxpipe
from tests.helpers.transparency import Result
from tests.whole.ranks.pool import Pool, RankFailed

from .setting import Setting, arguments

COUNT = 2
Said = list[tuple[str, str]]  # of each run: what has come of it, and why


class Ranks:
    """A pool of ranks, which starts when it is needed, and anew when it has failed."""

    def __init__(self) -> None:
        self.pool: Pool | None = None

    def run(self, path: Path, setting: Setting) -> Said:
        self.pool = self.pool or Pool(COUNT)
        try:
            said: Said = self.pool.run(steps, path, setting, ranks=tuple(range(COUNT)))[0]
        except RankFailed as error:
            self.close()
            return [("internal", str(error))]
        return said

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
        self.pool = None


def steps(group: Any, path: Path, setting: Setting) -> Said:
    """On each rank: the runs of a setting, which all take part in, until one is refused, or the plain model fails."""
    from .subject import PartlyWhole, Subject, load
    from .trial import caller, failed, same_error

    torch._dynamo.reset()
    warnings.simplefilter("ignore")
    subject = Subject(load(path))
    try:
        pipe = fxpipe.compile(subject.twin, group=group, timeout=60, **arguments(setting.options))
    except fxpipe.FxpipeError as error:
        return [outcome(failed(0, setting.runs[0], error))]
    said: Said = []
    try:
        for run in setting.runs:
            call = partial(subject.run, run, caller(run, subject, pipe))
            try:
                subject.wanted(run, setting)
            except Exception as own:
                return [*said, outcome(same_error(0, run, own, call))]
            try:
                found = together(group, call(), subject, pipe)
                text = "; ".join(subject.differences(run, setting, pipe, found))
                said.append(("wrong", text) if text else ("same", ""))
            except PartlyWhole:
                said.append(("partly whole", ""))
            except fxpipe.FxpipeError as error:
                return [*said, outcome(failed(0, run, error))]
    finally:
        pipe.close()
    return said


def outcome(found: Any) -> tuple[str, str]:
    values = asdict(found)
    return values["what"], values["text"]


def together(group: Any, part: Result, subject: Any, pipe: Any) -> Result:
    """What the ranks have of gradients and buffers, put together; outputs and loss are on each."""
    mine = {id(tensor) for tensor in pipe.own_tensors().values()}
    tensors = {**dict(subject.twin.named_parameters()), **dict(subject.twin.named_buffers())}
    own = {name for name, tensor in tensors.items() if id(tensor) in mine}
    kept = {name: value for name, value in part.gradients.items() if name in own or name not in tensors}
    buffers = {name: value for name, value in part.buffers.items() if name in own}
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, (kept, buffers), group)
    gradients = dict(part.gradients) | dict(joined(gradients for gradients, _ in parts))
    return Result(
        part.output,
        {name: gradients[name] for name in part.gradients},
        dict(part.buffers) | dict(joined(b for _, b in parts)),
    )


def joined(parts: Iterator[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    for part in parts:
        yield from ((name, value) for name, value in part.items() if value is not None)

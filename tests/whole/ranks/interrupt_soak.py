"""Ctrl-C at random moments, on one rank or on all: nobody waits for the timeout, and what follows is right.

    python -m tests.whole.ranks.interrupt_soak --runs 500 --ranks 2 --load

Ranks make the same calls one after the other, and go on with the next one whatever a call raises; one that Ctrl-C has
kept from entering a call makes it then. After a step its gradients are those of the plain model, or none are added.
Where Ctrl-C ends the pipe, which all ranks hear, they compile the model again.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fxpipe import RankError
from fxpipe.engines.transports import tcp_peer
from fxpipe.pipe.ranks.rank_calls import RankCalls
from tests.whole.ranks.cases import Chain, apart, chain
from tests.whole.ranks.pool import Pool, RankFailed

TIMEOUT = 60.0  # seconds, after which a rank counts as lost
HEARD = 20.0  # seconds until all have heard, on a machine that is busy
FIRST = ("first step", "step", "evaluation", "other batch", "optimizer", "step", "evaluation", "close")
LATER = ("step", "evaluation", "other batch", "optimizer", "step", "timeline", "collect", "step")


class Lifted:
    """SIGINT raises KeyboardInterrupt where it is let in, at most `left` times."""

    left = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.left:
            self.left -= 1
            raise KeyboardInterrupt


@dataclass(frozen=True)
class Part:
    """One call of a rank: its kind, when it began and ended, and what it raised."""

    kind: str
    began: float
    ended: float
    error: str


class Trainer:
    """What one rank keeps from run to run. `entered`: how many calls it has begun, as the other ranks see it."""

    entered = 0

    def __init__(self, group: Any) -> None:
        self.group, self.raised = group, Lifted()
        self.pipe, self.model, (self.x, self.y) = chain(group, "1f1b", timeout=TIMEOUT)
        size = dist.get_world_size(group)
        torch.manual_seed(0)
        self.plain = Chain(size).double()
        self.wanted = {rows: self._wanted(rows) for rows in (8, 6)}
        signal.signal(signal.SIGINT, self.raised)

    def _wanted(self, rows: int) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Loss, gradients and outputs of the plain model."""
        self.plain.zero_grad()
        output = self.plain(self.x[:rows])
        loss = F.mse_loss(output, self.y[:rows])
        loss.backward()
        grads = {name: p.grad.clone() for name, p in self.plain.named_parameters() if p.grad is not None}
        return loss.detach(), grads, output.detach()

    def compile(self) -> None:
        self.pipe, self.model, _ = chain(self.group, "1f1b", timeout=TIMEOUT)

    # Calls ------------------------------------------------------------------------------------------------------------

    def step(self, rows: int = 8, **options: Any) -> None:
        self.model.zero_grad()
        loss, grads, _ = self.wanted[rows]
        done = False
        try:
            found = self.pipe.step(self.x[:rows], target=self.y[:rows], loss_fn=F.mse_loss, **options)
            done = True
        finally:
            added = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
            here = {*self.pipe.own_tensors()} if added or done else set()
            assert added.keys() in (set(), here), added.keys()
            assert added or not done
            for name, grad in added.items():
                torch.testing.assert_close(grad, grads[name], rtol=1e-9, atol=0)
        torch.testing.assert_close(found, loss, rtol=1e-9, atol=0)

    def evaluate(self) -> None:
        with torch.no_grad():
            torch.testing.assert_close(self.pipe(self.x), self.wanted[8][2], rtol=1e-9, atol=0)

    def collect(self) -> None:
        assert self.pipe.collect(self.pipe.world.rank) == list(range(dist.get_world_size(self.group)))

    def update(self) -> None:
        optimizer = torch.optim.SGD(self.pipe.parameters(), 0.0)
        optimizer.step()
        if self.pipe.leads:
            time.sleep(0.05)  # the others wait for its next call

    def call(self, kind: str) -> Callable[[], None]:
        return {
            "first step": self.step,
            "step": self.step,
            "other batch": lambda: self.step(6),
            "timeline": lambda: self.step(timeline=True),
            "evaluation": self.evaluate,
            "collect": self.collect,
            "optimizer": self.update,
            "close": lambda: self.pipe.close(),
        }[kind]

    # A run ------------------------------------------------------------------------------------------------------------

    def run(self, kinds: Sequence[str], presses: int) -> tuple[list[Part], str]:
        """Make these calls, each whatever the one before has raised. Returns them, and what was wrong."""
        parts, wrong = list[Part](), ""
        at, began, before, error = 0, time.monotonic(), self.entered, ""
        self.raised.left = presses
        while at < len(kinds):
            try:
                if not began:
                    began, before = time.monotonic(), self.entered
                self.call(kinds[at])()
            except KeyboardInterrupt:
                error = error or "KeyboardInterrupt"
                if kinds[at] == "close" or (self.entered == before and kinds[at] != "optimizer"):
                    continue
            except RankError as failed:
                error = error or f"RankError: {failed}"
            except BaseException as failed:
                wrong = wrong or f"{kinds[at]}: {type(failed).__name__}: {failed}"
            try:
                parts.append(Part(kinds[at], began, time.monotonic(), error))
            except KeyboardInterrupt:
                parts = [*parts[:at], Part(kinds[at], began, time.monotonic(), "KeyboardInterrupt")]
            at, began, error = at + 1, 0.0, ""
        self.raised.left = 0
        return parts, wrong

    def settle(self) -> tuple[str, bool]:
        """Compile again if the pipe is closed or lost, and make a step: what was wrong, and whether it was lost."""
        lost = self.pipe.world.lost is not None
        if any(dist_collect(self.group, lost or self.pipe._state.closed)):
            if not self.pipe._state.closed:
                self.pipe.close()
            self.compile()
        try:
            self.step()
            self.evaluate()
        except BaseException as failed:
            return f"the step afterwards: {type(failed).__name__}: {failed}", lost
        return "", lost


def dist_collect(group: Any, value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group)
    return found


TRAINERS: list[Trainer] = []


def count_calls(name: str) -> None:
    """Count the calls of this method of `RankCalls`."""
    kept = getattr(RankCalls, name)

    def call(*args: Any) -> Any:
        Trainer.entered += 1
        return kept(*args)

    setattr(RankCalls, name, call)


def start(group: Any, far: bool) -> int:
    """Make what this rank keeps. Returns its process id."""
    for name in ("make", "gather"):
        count_calls(name)
    if far:
        tcp_peer.SMALL = 64  # so that some values go by torch.distributed
    with apart(far):
        TRAINERS[:] = [Trainer(group)]
    TRAINERS[0].step()
    return os.getpid()


def run(group: Any, fresh: bool, presses: int) -> tuple[list[Part], str]:
    """One run; a `fresh` one begins with a pipe that has not captured yet, and closes it."""
    trainer = TRAINERS[0]
    if fresh:
        trainer.pipe.close()
        trainer.compile()
    dist.barrier(group)
    return trainer.run(FIRST if fresh else LATER, presses)


def settle(group: Any) -> tuple[str, bool]:
    return TRAINERS[0].settle()


# The soak -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What became of an interrupt: the call that it came in, the ranks that it came to, the seconds until all had
    heard, whether the pipe was lost, and what was wrong."""

    moment: str
    who: str
    seconds: float
    lost: bool
    wrong: str


def soak(ranks: int, runs: int, far: bool = False, seed: int = 0) -> Iterator[Outcome]:
    draw, every, usual = random.Random(seed), tuple(range(ranks)), {True: 2.0, False: 0.2}
    done = 0
    while done < runs:
        pool = Pool(ranks)
        try:
            pids = pool.run(start, far, ranks=every)
            while done < runs:
                done, fresh = done + 1, done % 12 == 11
                struck = every if draw.random() < 0.4 else (draw.choice(every),)
                presses = draw.choice((1, 1, 2))
                pool.start(run, fresh, presses, ranks=every)
                time.sleep(draw.uniform(0, 0.95) * usual[fresh])
                pressed = time.monotonic()
                press([pids[rank] for rank in struck], presses, draw.choice((0, 0.001, 0.01)))
                found = answers(pool, every, pids)
                if any(one is None for one in found):
                    yield aborted(found, struck, presses, pressed)
                    break
                takes = max(parts[-1].ended - parts[0].began for parts, _ in found)
                usual[fresh] = 0.8 * usual[fresh] + 0.2 * min(5.0, takes)
                yield judged(pool, every, found, struck, presses, pressed)
        finally:
            pool.close()


def press(pids: Sequence[int], presses: int, apart: float) -> None:
    """Ctrl-C for these processes, once or twice."""
    for number in range(presses):
        if number:
            time.sleep(apart)
        for pid in pids:
            os.kill(pid, signal.SIGINT)


def answers(pool: Pool, every: Sequence[int], pids: Sequence[int]) -> list[Any]:
    """What ranks have returned, None for one that is gone; shows where they are if they take long."""
    end, found = time.monotonic() + HEARD, list[Any]()
    for rank in every:
        try:
            if not pool.ends[rank].poll(max(0.0, end - time.monotonic())):
                for pid in pids:
                    subprocess.run(["py-spy", "dump", "--pid", str(pid)], check=False)
            found += pool.results((rank,))
        except (EOFError, ConnectionResetError):
            found.append(None)
    return found


def named(struck: Sequence[int], presses: int) -> str:
    who = "all" if len(struck) > 1 else f"rank {struck[0]}"
    return f"{who}, {presses} times" if presses > 1 else who


def aborted(found: Sequence[Any], struck: Sequence[int], presses: int, pressed: float) -> Outcome:
    """Python was called by C++, which ends the process if an exception comes out; the others have missed it."""
    missed = [part.ended for one in found if one is not None for part in one[0] if "is gone" in part.error]
    told = all(one is None or any("is gone" in part.error for part in one[0]) for one in found)
    return Outcome(
        "in C++, which aborts", named(struck, presses), min(missed, default=pressed) - pressed, True,
        "" if told else f"not missed: {found}",
    )  # fmt: skip


def judged(
    pool: Pool, every: Sequence[int], found: Sequence[Any], struck: Sequence[int], presses: int, pressed: float
) -> Outcome:
    moment = next((part.kind for part in found[struck[0]][0] if part.ended > pressed), "after the last call")
    if any(part.ended < pressed < after.began for part, after in pairwise(found[struck[0]][0])):
        moment = "between calls"
    heard = [next((part.ended for part in parts if part.ended > pressed), pressed) for parts, _ in found]
    wrong = "; ".join(f"rank {rank}: {one}" for rank, (_, one) in enumerate(found) if one)
    odd = [
        f"rank {rank}, {part.kind}: {part.error}"
        for rank, (parts, _) in enumerate(found)
        for part in parts
        if "did not answer" in part.error or (part.ended - part.began > HEARD)
    ]
    after = pool.run(settle, ranks=every)
    wrong = "; ".join(text for text in (wrong, *odd, *(one for one, _ in after)) if text)
    return Outcome(moment, named(struck, presses), max(heard) - pressed, any(lost for _, lost in after), wrong)


@contextmanager
def load(processes: int) -> Iterator[None]:
    """So many processes that are always busy."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def report(outcomes: Sequence[Outcome]) -> str:
    """The seconds until all had heard, and the numbers by moment."""
    seconds = sorted(one.seconds for one in outcomes) or [0.0]
    shares = {f"{share:.0%}": seconds[min(int(share * len(seconds)), len(seconds) - 1)] for share in (0.5, 0.9, 0.99)}
    lines = [
        f"{len(outcomes)} interrupts; seconds until all had heard: "
        + ", ".join(f"{name} {value:.3f}" for name, value in shares.items())
        + f", most {seconds[-1]:.3f}"
    ]
    for title, name in (("moment", "moment"), ("ranks", "who")):
        counts = Counter(getattr(one, name) for one in outcomes)
        lines.append(f"by {title}: " + ", ".join(f"{what} {count}" for what, count in sorted(counts.items())))
    lines.append(f"pipes lost: {sum(one.lost for one in outcomes)}; wrong: {sum(bool(one.wrong) for one in outcomes)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--load", action="store_true", help="beside 4 busy processes")
    parser.add_argument("--far", action="store_true", help="ranks share no memory")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also in the background, which ignores it
    outcomes = list[Outcome]()
    with load(4 if given.load else 0):
        try:
            for one in soak(given.ranks, given.runs, given.far, given.seed):
                outcomes.append(one)
                if one.wrong or one.seconds > HEARD:
                    print(len(outcomes), one, flush=True)
        except KeyboardInterrupt:  # enough
            pass
        except RankFailed as failed:
            print(len(outcomes), failed, flush=True)
    print(report(outcomes))


if __name__ == "__main__":
    main()

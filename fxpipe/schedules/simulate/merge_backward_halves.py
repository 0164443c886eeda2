"""Merge the halves of a backward wherever no other stage waits for the first half.

    zb-h1     F0  F1      I0  W0  F2  I1  W1  F3  I2  W2  I3  W3
                  F0  I0  F1  I1  W0  F2  I2  W1  F3  I3  W2  W3

    rejoined  F0  F1      B0      F2  B1      F3  B2      B3          a B takes as long as an I and a W
                  F0  I0  F1  B1      F2  B2      F3  I3  W3  W0

A zero-bubble schedule splits every backward, because that makes the rule simple. A split costs a second run of
autograd, and pays only if the stage before waits for the input gradient, or if a weight gradient fills a gap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fxpipe.ir.schedule.schedule import Action, Schedule, needs, order

from .simulate import Hop, StageCost, recomputes, simulate

NEVER = float("inf")
SLACK = 0.01  # share by which a step may get longer by the profile, in which splits cost nothing


def merge_backward_halves(schedule: Schedule, costs: Sequence[StageCost], hops: Sequence[Hop] = ()) -> Schedule:
    """A schedule that takes as long (to one part in a hundred), keeps no more in memory, and splits fewer backwards.

    >>> from fxpipe.ir.schedule.schedule import parse
    >>> split = parse("F0 F1 . I0 W0 I1 W1 \\n . F0 I0 F1 I1 W0 W1", name="zb-h1")
    >>> print(merge_backward_halves(split, [StageCost(1, 2)] * 2))
    zb-h1: 2 stages, 2 micro-batches
    clock      0   1   2   3   4   5   6
    device 0  F0  F1      B0      B1
    device 1      F0  I0  F1  I1  W1  W0
    """
    if not any(action.kind == "W" for action in schedule.place):
        return schedule
    joined = _join(latest_first(schedule), costs, hops)
    # The walks ignore values that wait for a link or skip stages, so the result is simulated.
    before, after = (simulate(one, costs, hops).makespan for one in (schedule, joined))
    return joined if after <= before * (1 + SLACK) else schedule


def latest_first(schedule: Schedule) -> Schedule:
    """The schedule with weight gradients in another order: of those that a stage still has to do, the newest comes
    first. Their number at any time does not change."""
    return replace(schedule, devices=tuple(_latest_first(row) for row in schedule.devices))


def _latest_first(row: Sequence[Action]) -> tuple[Action, ...]:
    left: dict[int, list[Action]] = {}
    done = []
    for action in row:
        if action.kind == "I":
            left.setdefault(action.stage, []).append(action._replace(kind="W"))
        done.append(left[action.stage].pop() if action.kind == "W" else action)
    return tuple(done)


def _join(schedule: Schedule, costs: Sequence[StageCost], hops: Sequence[Hop]) -> Schedule:
    """Join halves that stand side by side, if then every action still starts by its latest start."""
    way = {(hop.target, hop.source): hop.backward for hop in hops} | {(h.source, h.target): h.forward for h in hops}
    steps = _Steps(schedule, costs, way, order(schedule)[0])
    end, _ = _walk(steps, {})
    _, joined = _walk(steps, _latest_starts(steps, end * (1 + SLACK)))
    gone = {action._replace(kind="W") for action in joined}

    def whole(row: Sequence[Action]) -> tuple[Action, ...]:
        return tuple(a._replace(kind="B") if a in joined else a for a in row if a not in gone)

    return replace(schedule, devices=tuple(whole(row) for row in schedule.devices))


class _Steps(NamedTuple):
    """What both walks need: the actions, in an order in which they can run, and their costs. `way` has the seconds of a
    transfer from one stage to another."""

    schedule: Schedule
    costs: Sequence[StageCost]
    way: Mapping[tuple[int, int], float]
    actions: Sequence[Action]

    def again(self, action: Action) -> float:
        """Seconds of the recomputation before an action."""
        kind, s, i = action
        again = kind in "BI" and recomputes(self.schedule, self.costs[s], s, i)
        return self.costs[s].seconds("R") if again else 0.0

    def side_by_side(self, action: Action) -> bool:
        """Whether the weight gradient directly follows this input gradient."""
        device, position = self.schedule.place[action]
        return self.schedule.devices[device][position + 1 : position + 2] == (action._replace(kind="W"),)


def _walk(steps: _Steps, late: Mapping[Action, float]) -> tuple[float, set[Action]]:
    """When the last action ends, and the input gradients that can be joined with their other halves so that every
    action starts by its latest start."""
    schedule, costs, way, actions = steps
    free = [0.0] * len(schedule.devices)
    ended: dict[Action, float] = {}
    joined: set[Action] = set()
    for action in actions:
        kind, s, i = action
        device = schedule.place[action][0]
        if kind == "W" and action._replace(kind="I") in joined:
            ended[action] = free[device]
            continue
        arrivals = [ended[need] + way.get((need.stage, s), 0.0) for need in needs(schedule, action)]
        start = max(free[device] + steps.again(action), *arrivals, 0.0)
        if late and kind == "I" and steps.side_by_side(action):
            due = min(late.get(Action(other, s - 1, i), NEVER) for other in "BI")
            if start + costs[s].seconds("B") + way.get((s, s - 1), 0.0) <= due:
                joined.add(action)
        ended[action] = free[device] = start + costs[s].seconds("B" if action in joined else kind)
    return max(free), joined


def _latest_starts(steps: _Steps, end: float) -> dict[Action, float]:
    """The latest start of each action with which all ends by `end`."""
    schedule, costs, way, actions = steps
    late: dict[Action, float] = {}
    due = dict.fromkeys(actions, end)
    free = [end] * len(schedule.devices)
    for action in reversed(actions):
        device, s = schedule.place[action][0], action.stage
        late[action] = min(due[action], free[device]) - costs[s].seconds(action.kind)
        free[device] = late[action] - steps.again(action)
        for need in needs(schedule, action):
            due[need] = min(due[need], late[action] - way.get((need.stage, s), 0.0))
    return late

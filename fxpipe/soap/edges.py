"""Compiled: what moves along an edge when its two operators are cut in given ways, and what devices exchange of a group
of weights. The plain words for it are `tasks.transfers` and `tasks.exchanges`."""

from __future__ import annotations

from .arrays import Ints, Problem, State
from .compiled import compiled


@compiled
def part_at(size: int, degree: int, x: int) -> int:
    """The part in which index x lies when `size` is cut into `degree` parts."""
    base = size // degree
    longer = size - base * degree
    turn = longer * (base + 1)
    return x // (base + 1) if x < turn else longer + (x - turn) // base


@compiled
def first_of(size: int, degree: int, part: int) -> int:
    """Where a part begins."""
    base = size // degree
    return part * base + min(part, size - base * degree)


@compiled
def overlaps(p: Problem, s: State, e: int, rows: Ints) -> int:
    """Write, for each part m of the consumer, the parts of the producer that it reads of (`peer`, from `top` on) and how
    many elements (`volume`, from 0 on); `rows` says where each m's begin. Returns where the next row begins."""
    i, j = p.source[e], p.target[e]
    row_b = s.row[j]
    a, b, made, taken = p.degrees[s.row[i]], p.degrees[row_b], p.sizes[i], p.sizes[j]
    low, high, first, last, index = s.scratch[0], s.scratch[1], s.scratch[2], s.scratch[3], s.scratch[4]
    begin = s.top[0]
    top = begin
    for m in range(p.row_parts[row_b]):
        rows[m] = top
        rest = m
        for r in range(3, -1, -1):
            index[r] = rest % b[r]
            rest //= b[r]
        empty = False
        for r in range(4):
            along = p.need[e, r, 0]
            low[r], high[r] = 0, made[r]
            if along >= 0:
                start = first_of(taken[along], b[along], index[along])
                after = first_of(taken[along], b[along], index[along] + 1)
                stride, before, window, divide = p.need[e, r, 1], p.need[e, r, 2], p.need[e, r, 3], p.need[e, r, 4]
                low[r] = min(max((stride * start - before) // divide, 0), made[r])
                high[r] = min((stride * (after - 1) - before + window - 1) // divide + 1, made[r])
            if high[r] <= low[r]:
                empty = True
                break
            first[r] = part_at(made[r], a[r], low[r])
            last[r] = part_at(made[r], a[r], high[r] - 1)
        if empty:
            continue
        for k0 in range(first[0], last[0] + 1):
            v0 = min(high[0], first_of(made[0], a[0], k0 + 1)) - max(low[0], first_of(made[0], a[0], k0))
            for k1 in range(first[1], last[1] + 1):
                v1 = v0 * (min(high[1], first_of(made[1], a[1], k1 + 1)) - max(low[1], first_of(made[1], a[1], k1)))
                for k2 in range(first[2], last[2] + 1):
                    v2 = v1 * (min(high[2], first_of(made[2], a[2], k2 + 1)) - max(low[2], first_of(made[2], a[2], k2)))
                    for k3 in range(first[3], last[3] + 1):
                        v3 = min(high[3], first_of(made[3], a[3], k3 + 1)) - max(low[3], first_of(made[3], a[3], k3))
                        s.message[top].peer = ((k0 * a[1] + k1) * a[2] + k2) * a[3] + k3
                        s.volume[top - begin] = v2 * v3
                        top += 1
    for m in range(p.row_parts[row_b], p.parts + 1):
        rows[m] = top
    return top


@compiled
def join(p: Problem, s: State, e: int) -> None:
    """Make the rows of an edge anew, at the end of those in use, from the rows and places of its two operators."""
    i, j, M = p.source[e], p.target[e], p.parts
    backward, forward, count = s.backward_rows[e], s.forward_rows[e], s.count
    begin = s.top[0]
    middle = overlaps(p, s, e, backward)
    count[:] = 0
    for x in range(begin, middle):
        count[s.message[x].peer] += 1
    at = middle
    for k in range(M + 1):
        forward[k] = at
        at += count[k]
        count[k] = forward[k]
    for m in range(p.row_parts[s.row[j]]):
        b = s.task[j * M + m].place
        for x in range(backward[m], backward[m + 1]):
            k = s.message[x].peer
            a = s.task[i * M + k].place
            size = s.volume[x - begin] * p.element
            y = count[k]
            count[k] += 1
            s.message[y].peer = m
            s.message[x].wire = p.link[b, a]
            s.message[y].wire = p.link[a, b]
            s.message[x].lasts = p.latency[b, a] + size / p.rate[b, a]
            s.message[y].lasts = p.latency[a, b] + size / p.rate[a, b]
    s.top[0] = at


@compiled
def count_waits(p: Problem, s: State, e: int, sign: int) -> None:
    """Add an edge's messages to what its parts wait for, or with sign -1 take them away."""
    i, j, M = p.source[e], p.target[e], p.parts
    backward = (2 * p.n - 1 - i) * M
    for m in range(p.row_parts[s.row[j]]):
        s.task[j * M + m].waits += sign * (s.backward_rows[e, m + 1] - s.backward_rows[e, m])
    for k in range(p.row_parts[s.row[i]]):
        s.task[backward + k].waits += sign * (s.forward_rows[e, k + 1] - s.forward_rows[e, k])


@compiled
def hold(p: Problem, s: State, i: int, sign: int) -> None:
    """Note that operator i's devices hold its weights, or with sign -1 that they no longer do."""
    g, row = p.group[i], s.row[i]
    shards = 1
    for r in range(4):
        if p.is_parameter[i, r]:
            shards *= p.degrees[row, r]
    each = p.shares // shards
    for k in range(p.row_parts[row]):
        shard, factor, rest = 0, 1, k
        for r in range(3, -1, -1):
            if p.is_parameter[i, r]:
                shard += factor * (rest % p.degrees[row, r])
                factor *= p.degrees[row, r]
            rest //= p.degrees[row, r]
        d = s.task[i * p.parts + k].place
        for u in range(shard * each, (shard + 1) * each):
            was = s.cover[g, d, u] > 0
            s.cover[g, d, u] += sign
            s.held[g, u] += (s.cover[g, d, u] > 0) - was


@compiled
def exchange(p: Problem, s: State, g: int) -> None:
    """What each device passes on to the next that holds any of the group's weights."""
    share = p.group_bytes[g] / p.shares
    first, previous = -1, -1
    for d in range(p.devices):
        passed, holds = 0.0, False
        for u in range(p.shares):
            if s.cover[g, d, u] > 0:
                holds = True
                n = s.held[g, u]
                passed += 2 * (n - 1) / n * share
        s.sync[g, d].lasts = passed
        if holds:
            first = d if first < 0 else first
            if previous >= 0:
                _pass_on(p, s, g, previous, d)
            previous = d
    if previous >= 0:
        _pass_on(p, s, g, previous, first)


@compiled
def _pass_on(p: Problem, s: State, g: int, d: int, to: int) -> None:
    if s.sync[g, d].lasts > 0:
        s.sync[g, d].wire = p.link[d, to]
        s.sync[g, d].lasts = p.latency[d, to] + s.sync[g, d].lasts / p.rate[d, to]

"""Compiled: the messages along an edge between two operators that are cut, and the exchange of a group of weights
between devices. `task_graph.transfers` and `task_graph.exchanges` are the same in plain Python."""

from __future__ import annotations

from .flat_arrays import RANK, Floats, Ints, Problem, State
from .numba_compiler import compiled


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
def overlaps(
    a: Ints,
    b: Ints,
    made: Ints,
    taken: Ints,
    need: Ints,
    parts: int,
    first_pair: Ints,
    pair: Ints,
    volume: Floats,
    scratch: Ints,
) -> int:
    """Write, for each part m of the consumer (there are `parts`), the regions of the producer that m reads (`pair`) and
    how many elements (`volume`). `first_pair[m]` is where those of m begin. Returns how many pairs there are. Degrees
    `a` cut the sizes `made` of the producer, `b` the sizes `taken` of the consumer."""
    low, high, first, last, index = scratch[0], scratch[1], scratch[2], scratch[3], scratch[4]
    top = 0
    for m in range(parts):
        first_pair[m] = top
        rest = m
        for r in range(RANK, -1, -1):
            index[r] = rest % b[r]
            rest //= b[r]
        empty = False
        for r in range(RANK):
            along = need[r, 0]
            low[r], high[r] = 0, made[r]
            if along >= 0:
                start = first_of(taken[along], b[along], index[along])
                after = first_of(taken[along], b[along], index[along] + 1)
                stride, before, window, divide = need[r, 1], need[r, 2], need[r, 3], need[r, 4]
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
                        for k4 in range(first[4], last[4] + 1):
                            ends = first_of(made[4], a[4], k4), first_of(made[4], a[4], k4 + 1)
                            pair[top] = (((k0 * a[1] + k1) * a[2] + k2) * a[3] + k3) * a[4] + k4
                            volume[top] = v2 * v3 * (min(high[4], ends[1]) - max(low[4], ends[0]))
                            top += 1
    first_pair[parts:].fill(top)
    return top


@compiled
def keep_bytes(p: Problem, s: State, i: int, d: int, size: float) -> None:
    """Device d keeps so many bytes more for the backward of operator i."""
    s.device[d].held += size
    s.since[d, p.before[i]] += size


@compiled
def join(p: Problem, s: State, edges: Ints) -> bool:
    """Make the rows of these edges anew, at the end of those in use, from the rows and places of their operators, and
    add them to the load of links. False if there is no room."""
    for x in range(len(edges)):
        e = edges[x]
        i, j = p.source[e], p.target[e]
        row_a, row_b = s.row[i], s.row[j]
        parts = p.row_parts[row_b]
        if s.top[0] + 2 * p.row_parts[row_a] * parts > len(s.message):
            return False
        a, b = p.degrees[row_a], p.degrees[row_b]
        overlaps(a, b, p.sizes[i], p.sizes[j], p.need[e], parts, s.pair_first, s.pair[0], s.volume, s.scratch)
        _choose_holders(p, s, i, j)
        if has_copies(p, s, j):
            _rows_from_copies(p, s, e)
        else:
            _rows_from_readers(p, s, e)
        _rows_from_holders(p, s, e)
    return True


@compiled
def holders(p: Problem, s: State, i: int) -> int:
    """How many parts of operator i have the same region."""
    return int(p.degrees[s.row[i], RANK])


@compiled
def has_copies(p: Problem, s: State, i: int) -> bool:
    """Whether parts of operator i with the same region are copies."""
    return bool(holders(p, s, i) > 1 and p.is_parameter[i, RANK] == 0)


@compiled
def has_sums(p: Problem, s: State, i: int) -> bool:
    """Whether parts of operator i with the same region compute partial sums."""
    return bool(holders(p, s, i) > 1 and p.is_parameter[i, RANK] > 0)


@compiled
def gradient_slots(p: Problem, s: State, e: int) -> tuple[int, int]:
    """Where gradients along an edge arrive: those for part k in slot first + k // each. For several holders these are
    the slots of sums, except for gradients that copies give, which nothing is added to."""
    i, each = p.source[e], holders(p, s, p.source[e])
    if each > 1 and not has_copies(p, s, p.target[e]):
        return (4 * p.n - 2 * i - 2) * p.parts, each
    return (4 * p.n - 2 * i - 1) * p.parts, 1


@compiled
def nearest(p: Problem, s: State, first: int, count: int, to: int, size: float) -> int:
    """Of the parts in `count` slots from `first` on the one on device `to`; if there is none, the one whose message to
    it takes least. Counted from `first`."""
    found, least = 0, 0.0
    for x in range(count):
        d = s.task[first + x].place
        if d == to:
            return x
        seconds = p.latency[d, to] + size / p.rate[d, to]
        if x == 0 or seconds < least:
            found, least = x, seconds
    return found


@compiled
def _choose_holders(p: Problem, s: State, i: int, j: int) -> None:
    """For each pair the part of the producer that the consumer's part reads from."""
    each = holders(p, s, i)
    for m in range(p.row_parts[s.row[j]]):
        to = s.task[2 * j * p.parts + m].place
        for x in range(s.pair_first[m], s.pair_first[m + 1]):
            first = s.pair[0, x] * each
            s.pair[1, x] = first
            if each > 1:
                s.pair[1, x] += nearest(p, s, 2 * i * p.parts + first, each, to, s.volume[x] * p.element)


@compiled
def _write(p: Problem, s: State, y: int, peer: int, a: int, b: int, elements: float) -> None:
    """Write message y, from device a to a peer on device b."""
    one = s.message[y]
    one.peer = peer
    one.wire = p.link[a, b]
    one.size = elements * p.element
    one.lasts = p.latency[a, b] + one.size / p.rate[a, b]
    if a != b:
        s.link_load[one.wire] += one.lasts


@compiled
def _rows_from_readers(p: Problem, s: State, e: int) -> None:
    """The rows of gradients: each part of the consumer sends them back to where it reads from."""
    i, j, top = p.source[e], p.target[e], s.top[0]
    for m in range(p.parts + 1):
        s.backward_rows[e, m] = top + s.pair_first[m]
    for m in range(p.row_parts[s.row[j]]):
        d = s.task[2 * j * p.parts + m].place
        for x in range(s.pair_first[m], s.pair_first[m + 1]):
            k = s.pair[1, x]
            _write(p, s, top + x, k, d, s.task[2 * i * p.parts + k].place, s.volume[x])
    s.top[0] = s.backward_rows[e, p.parts]


@compiled
def _rows_from_copies(p: Problem, s: State, e: int) -> None:
    """The rows of gradients that copies have: each holder gets those of one copy."""
    i, j = p.source[e], p.target[e]
    each, same = holders(p, s, i), holders(p, s, j)
    count, at = s.counted, s.top[0]
    for turn in range(2):  # first they are counted, then written
        if turn == 0:
            count.fill(0)
        else:
            for m in range(len(count)):
                s.backward_rows[e, m] = at
                at += count[m]
                count[m] = s.backward_rows[e, m]
        for m in range(0, p.row_parts[s.row[j]], same):
            for x in range(s.pair_first[m], s.pair_first[m + 1]):
                for k in range(s.pair[0, x] * each, (s.pair[0, x] + 1) * each):
                    to = s.task[2 * i * p.parts + k].place
                    copy = m + nearest(p, s, 2 * j * p.parts + m, same, to, s.volume[x] * p.element)
                    if turn:
                        _write(p, s, count[copy], k, s.task[2 * j * p.parts + copy].place, to, s.volume[x])
                    count[copy] += 1
    s.top[0] = s.backward_rows[e, p.parts]


@compiled
def _rows_from_holders(p: Problem, s: State, e: int) -> None:
    """The rows of values: each part of the consumer gets them from the holder that it reads from."""
    i, j, count = p.source[e], p.target[e], s.counted
    count.fill(0)
    parts = p.row_parts[s.row[j]]
    for x in range(s.pair_first[parts]):
        count[s.pair[1, x]] += 1
    at = s.top[0]
    for k in range(len(count)):
        s.forward_rows[e, k] = at
        at += count[k]
        count[k] = s.forward_rows[e, k]
    for m in range(parts):
        to = s.task[2 * j * p.parts + m].place
        for x in range(s.pair_first[m], s.pair_first[m + 1]):
            k = s.pair[1, x]
            _write(p, s, count[k], m, s.task[2 * i * p.parts + k].place, to, s.volume[x])
            if p.inside[e] and s.message[count[k]].wire >= 0:
                keep_bytes(p, s, j, to, s.message[count[k]].size)
            count[k] += 1
    s.top[0] = at


@compiled
def count_waits(p: Problem, s: State, edges: Ints, sign: int) -> None:
    """Add the messages of these edges to the counts that their parts, and the sums of gradients, wait for; with sign -1
    subtract them. Parts wait for the sum of their gradients if that waits for anything."""
    M, task, message = p.parts, s.task, s.message
    for x in range(len(edges)):
        e = edges[x]
        i, j = p.source[e], p.target[e]
        for y in range(s.forward_rows[e, 0], s.forward_rows[e, M]):
            task[2 * j * M + message[y].peer].waits += sign
        first, each = gradient_slots(p, s, e)
        for y in range(s.backward_rows[e, 0], s.backward_rows[e, M]):
            t = first + message[y].peer // each
            task[t].waits += sign
            if each > 1 and task[t].waits == (1 if sign > 0 else 0):
                part = (4 * p.n - 2 * i - 1) * M + message[y].peer // each * each
                for k in range(each):
                    task[part + k].waits += sign


@compiled
def pass_on(p: Problem, s: State, i: int) -> None:
    """Set what each device passes on in the ring of each region's holders, in order of devices."""
    each = holders(p, s, i)
    for k in range(p.parts):
        s.ring[i, k].lasts = s.ring[p.n + i, k].lasts = 0.0
    if each == 1:
        return
    for first in range(0, p.row_parts[s.row[i]], each):
        parts = 2 * i * p.parts + first
        count, last = 0, p.devices
        for k in range(each):
            repeated = False
            for other in range(k):
                repeated |= s.task[parts + other].place == s.task[parts + k].place
            count += not repeated
        if count == 1:
            continue
        passed = 2 * (count - 1) / count * (_elements(p, s, i, first // each) * p.element)
        to = _after(p, s, parts, each, -1)
        for x in range(count - 1, -1, -1):
            d = _before(p, s, parts, each, last)
            for way in range(2):
                one = s.ring[way * p.n + i, first + x]
                one.wire = p.link[d, to]
                one.lasts = p.latency[d, to] + passed / p.rate[d, to]
            to = last = d


@compiled
def _after(p: Problem, s: State, parts: int, each: int, d: int) -> int:
    """The first device after d of the parts in `each` slots from `parts` on."""
    found = p.devices
    for k in range(each):
        if d < s.task[parts + k].place < found:
            found = s.task[parts + k].place
    return found


@compiled
def _before(p: Problem, s: State, parts: int, each: int, d: int) -> int:
    """The last device before d of the parts in `each` slots from `parts` on."""
    found = -1
    for k in range(each):
        if found < s.task[parts + k].place < d:
            found = s.task[parts + k].place
    return found


@compiled
def _elements(p: Problem, s: State, i: int, region: int) -> int:
    """How many elements a region of operator i's output has."""
    found, rest = 1, region
    for r in range(RANK - 1, -1, -1):
        degree = p.degrees[s.row[i], r]
        at = rest % degree
        rest //= degree
        found *= first_of(p.sizes[i, r], degree, at + 1) - first_of(p.sizes[i, r], degree, at)
    return found


@compiled
def unload(p: Problem, s: State, edges: Ints) -> None:
    """Take the messages of these edges off the load of their links, and off the memory of those that get them."""
    message, load = s.message, s.link_load
    for x in range(len(edges)):
        for y in range(s.backward_rows[edges[x], 0], s.forward_rows[edges[x], p.parts]):
            if message[y].wire >= 0:
                load[message[y].wire] -= message[y].lasts
        if p.inside[edges[x]]:
            parts = 2 * p.target[edges[x]] * p.parts
            for y in range(s.forward_rows[edges[x], 0], s.forward_rows[edges[x], p.parts]):
                if message[y].wire >= 0:
                    keep_bytes(p, s, p.target[edges[x]], s.task[parts + message[y].peer].place, -message[y].size)


@compiled
def hold(p: Problem, s: State, i: int, sign: int) -> None:
    """Count operator i's devices as holders of its weights; with sign -1 no longer."""
    g, row = p.group[i], s.row[i]
    cover, held, task = s.cover[g], s.held[g], s.task
    degrees, is_parameter = p.degrees[row], p.is_parameter[i]
    copies = degrees[RANK] if has_copies(p, s, i) else 1
    shards = 1
    for r in range(RANK + 1):
        if is_parameter[r]:
            shards *= degrees[r]
    each = p.shares // shards
    for k in range(p.row_parts[row]):
        shard, factor, rest = 0, 1, k
        for r in range(RANK, -1, -1):
            if is_parameter[r]:
                shard += factor * (rest % degrees[r])
                factor *= degrees[r]
            rest //= degrees[r]
        d = task[2 * i * p.parts + k].place
        for u in range(shard * each, (shard + 1) * each):
            was = cover[d, u] > 0
            cover[d, u] += sign
            now = (cover[d, u] > 0) - was
            held[u] += now
            s.summands[g, u] += sign * (k % copies == 0)
            s.device[d].held += now * p.held_bytes[g]


@compiled
def exchange(p: Problem, s: State, g: int) -> None:
    """Set what each device passes on in the ring of all devices that hold any weights of group g."""
    share = p.group_bytes[g] / p.shares
    cover, held, sync = s.cover[g], s.held[g], s.sync[g]
    to = -1
    for d in range(p.devices):
        for u in range(p.shares):
            if to < 0 and cover[d, u] > 0:
                to = d
    for d in range(p.devices - 1, -1, -1):
        passed, holds = 0.0, False
        for u in range(p.shares):
            if cover[d, u] > 0:
                holds = True
                n = held[u] if s.summands[g, u] > 1 else 1
                passed += 2 * (n - 1) / n * share
        sync[d].lasts = 0.0
        if passed > 0:
            sync[d].wire = p.link[d, to]
            sync[d].lasts = p.latency[d, to] + passed / p.rate[d, to]
        to = d if holds else to

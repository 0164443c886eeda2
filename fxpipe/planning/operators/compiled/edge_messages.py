"""Compiled: the messages along an edge between two operators that are cut, and the exchange of a group of weights
between devices. `task_graph.transfers` and `task_graph.exchanges` are the same in plain Python."""

from __future__ import annotations

from .flat_arrays import Floats, Ints, Problem, Records, State
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
    rows: Ints,
    message: Records,
    volume: Floats,
    scratch: Ints,
    top: int,
) -> int:
    """Write, for each part m of the consumer (there are `parts`), the parts of the producer that m reads (`peer`, from
    `top` on) and how many elements (`volume`, from 0 on). `rows[m]` is where those of m begin. Returns where the next
    row begins. Degrees `a` cut the sizes `made` of the producer, `b` the sizes `taken` of the consumer."""
    low, high, first, last, index = scratch[0], scratch[1], scratch[2], scratch[3], scratch[4]
    begin = top
    for m in range(parts):
        rows[m] = top
        rest = m
        for r in range(3, -1, -1):
            index[r] = rest % b[r]
            rest //= b[r]
        empty = False
        for r in range(4):
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
                        message[top].peer = ((k0 * a[1] + k1) * a[2] + k2) * a[3] + k3
                        volume[top - begin] = v2 * v3
                        top += 1
    rows[parts:].fill(top)
    return top


@compiled
def join(p: Problem, s: State, edges: Ints) -> bool:
    """Make the rows of these edges anew, at the end of those in use, from the rows and places of their operators, and
    add them to the load of links. False if there is no room."""
    for x in range(len(edges)):
        e = edges[x]
        i, j = p.source[e], p.target[e]
        row_a, row_b = s.row[i], s.row[j]
        parts, top = p.row_parts[row_b], s.top[0]
        backward, forward = s.backward_rows[e], s.forward_rows[e]
        if top + 2 * p.row_parts[row_a] * parts > len(s.message):
            return False
        a, b = p.degrees[row_a], p.degrees[row_b]
        middle = overlaps(a, b, p.sizes[i], p.sizes[j], p.need[e], parts, backward, s.message, s.volume, s.scratch, top)
        s.top[0] = rows_between(
            middle,
            top,
            parts,
            forward,
            backward,
            s.task[i * p.parts : (i + 1) * p.parts],
            s.task[j * p.parts : (j + 1) * p.parts],
            s.message,
            s.volume,
            s.counted,
            p.link,
            p.latency,
            p.rate,
            p.element,
            s.link_load,
        )
    return True


@compiled
def rows_between(
    middle: int,
    begin: int,
    parts: int,
    forward: Ints,
    backward: Ints,
    senders: Records,
    receivers: Records,
    message: Records,
    volume: Floats,
    count: Ints,
    link: Ints,
    latency: Floats,
    rate: Floats,
    element: int,
    link_load: Floats,
) -> int:
    """Given which part reads which, in rows from `begin` to `middle`, add the rows of the other direction, and set the
    link and the seconds of each message in both. Returns where the next row begins."""
    count.fill(0)
    for x in range(begin, middle):
        count[message[x].peer] += 1
    at = middle
    for k in range(len(count)):
        forward[k] = at
        at += count[k]
        count[k] = forward[k]
    for m in range(parts):
        b = receivers[m].place
        for x in range(backward[m], backward[m + 1]):
            k = message[x].peer
            a = senders[k].place
            size = volume[x - begin] * element
            y = count[k]
            count[k] += 1
            message[y].peer = m
            message[x].wire = link[b, a]
            message[y].wire = link[a, b]
            message[x].lasts = latency[b, a] + size / rate[b, a]
            message[y].lasts = latency[a, b] + size / rate[a, b]
            if a != b:
                link_load[message[x].wire] += message[x].lasts
                link_load[message[y].wire] += message[y].lasts
    return at


@compiled
def count_waits(p: Problem, s: State, edges: Ints, sign: int) -> None:
    """Add the messages of these edges to the counts that their parts wait for; with sign -1 subtract them."""
    M, task = p.parts, s.task
    for x in range(len(edges)):
        e = edges[x]
        i, j = p.source[e], p.target[e]
        from_producer, from_consumer = s.backward_rows[e], s.forward_rows[e]  # a part gets and sends back equally many
        for m in range(p.row_parts[s.row[j]]):
            task[j * M + m].waits += sign * (from_producer[m + 1] - from_producer[m])
        for k in range(p.row_parts[s.row[i]]):
            task[(2 * p.n - 1 - i) * M + k].waits += sign * (from_consumer[k + 1] - from_consumer[k])


@compiled
def unload(p: Problem, s: State, edges: Ints) -> None:
    """Take the messages of these edges off the load of their links."""
    message, load = s.message, s.link_load
    for x in range(len(edges)):
        for y in range(s.backward_rows[edges[x], 0], s.forward_rows[edges[x], p.parts]):
            if message[y].wire >= 0:
                load[message[y].wire] -= message[y].lasts


@compiled
def hold(p: Problem, s: State, i: int, sign: int) -> None:
    """Count operator i's devices as holders of its weights; with sign -1 no longer."""
    g, row = p.group[i], s.row[i]
    cover, held, task = s.cover[g], s.held[g], s.task
    degrees, is_parameter = p.degrees[row], p.is_parameter[i]
    shards = 1
    for r in range(4):
        if is_parameter[r]:
            shards *= degrees[r]
    each = p.shares // shards
    for k in range(p.row_parts[row]):
        shard, factor, rest = 0, 1, k
        for r in range(3, -1, -1):
            if is_parameter[r]:
                shard += factor * (rest % degrees[r])
                factor *= degrees[r]
            rest //= degrees[r]
        d = task[i * p.parts + k].place
        for u in range(shard * each, (shard + 1) * each):
            was = cover[d, u] > 0
            cover[d, u] += sign
            now = (cover[d, u] > 0) - was
            held[u] += now
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
                n = held[u]
                passed += 2 * (n - 1) / n * share
        sync[d].lasts = 0.0
        if passed > 0:
            sync[d].wire = p.link[d, to]
            sync[d].lasts = p.latency[d, to] + passed / p.rate[d, to]
        to = d if holds else to

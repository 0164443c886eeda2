"""A program as a picture: the stages as cards with their devices, and the values that move between them.

          ╭──────── skip ────────╮              portals above: values that pass over stages
inputs   ╭┴────────╮         ╭───▼─────╮      (inputs and outputs that do so have another colour)
image  ─▶│ stage 0 │── x ───▶│ stage 2 │─▶ y    between neighbours, arrows
         ╰┬────────╯         ╰───▲─────╯
          ╰┄┄┄┄ embed.weight ┄┄┄┄╯              loans below: tensors of the model that stages share

Many stages stand in several rows. The pill at the end of a row stands for the stages of the rows below, and that at the
beginning of the next for those above: what goes from row to row ends at the one, and begins again at the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from fxpipe.ir.plan.hybrid_plan import joined, ranges
from fxpipe.ir.program.program import Move, Program, Stage
from fxpipe.viz.svg_elements import WIDE, arrow_head, page, tag, text_width, words

LEVEL, LINE = 26.0, 16.0  # heights: between arcs, of a line in a card
TOP, BELOW, LEFT = 84.0, 28.0, 24.0  # where the first row is, how far apart rows are, the margin at the sides
LEAST = 4  # so few stages are in one row, also if it is wider than WIDE
PILL = 60.0  # the width of what stands for the caller
MODULES, LONGEST = 5, 26  # as many of a stage's modules, and letters of each, as a card shows


@dataclass(frozen=True)
class _Card:
    """The place of a stage, or of the pill at an end of a row: what stands there for the caller or for other rows."""

    x: float
    width: float
    y: float
    height: float
    name: str  # as it shows

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


@dataclass(frozen=True)
class _Arc:
    """What goes from one card to others, past those between: drawn at `level`, the lowest nearest to the cards."""

    source: int
    targets: tuple[int, ...]
    label: str
    kind: str
    level: int


@dataclass(frozen=True)
class _Row:
    """The stages from `first` to `last`, beside each other; the pills at the ends have the numbers before and after."""

    first: int
    last: int
    over: tuple[_Arc, ...]
    under: tuple[_Arc, ...]

    @property
    def indices(self) -> range:
        return range(self.first - 1, self.last + 2)

    @property
    def above(self) -> float:
        """The height of the arcs over the cards."""
        return LEVEL * _levels(self.over) + (14 if self.over else 0)

    @property
    def below(self) -> float:
        return LEVEL * _levels(self.under) + (18 if self.under else 0)


def draw(program: Program) -> str:
    """The picture as the text of an SVG file."""
    between = _values(program)
    rows, places = _rows(program, between)
    lines = [words(program.graph.model, LEFT, 36, size=17, font_weight=600)]
    lines.append(words(_facts(program), LEFT, 57, "soft", 12.5))
    y, right = TOP, 0.0
    for row in rows:
        cards = _cards(program, row, places, y + row.above)
        lines += _row(program, row, cards, between)
        card = cards[row.first]
        y, right = card.y + card.height + row.below + BELOW, max(right, cards[row.last + 1].right)
    return page(right + LEFT, y, program.graph.model, lines)


def _row(
    program: Program, row: _Row, cards: Mapping[int, _Card], between: Mapping[tuple[int, int], Sequence[str]]
) -> Iterator[str]:
    for arcs, up in ((row.over, True), (row.under, False)):
        for arc in arcs:
            yield from _bow(row, cards, arcs, arc, up)
        for arc in arcs:  # later, on top of lines that cross
            yield from _name(row, cards, arc, up)
    for pair in pairwise(row.indices):
        yield from _flow(program, cards[pair[0]], cards[pair[1]], between.get(pair, []))
    for stage in program.stages[row.first : row.last + 1]:
        yield from _card(program, stage, cards[stage.index])
    for index in (row.first - 1, row.last + 1):
        yield from _end(cards[index])


def _rows(
    program: Program, between: Mapping[tuple[int, int], Sequence[str]]
) -> tuple[tuple[_Row, ...], tuple[tuple[float, float], ...]]:
    """The rows, as few as are narrow enough, and the place and width of each column, pills included."""
    n = len(program.stages)
    for count in range(1, n + 1):
        columns = -(-n // count)
        rows = tuple(_arcs_of(program, first, min(first + columns, n) - 1) for first in range(0, n, columns))
        places = _places(program, rows, between)
        if sum(places[-1]) + LEFT <= WIDE or columns <= LEAST:
            break
    return rows, places


def _arcs_of(program: Program, first: int, last: int) -> _Row:
    n = len(program.stages)
    users: dict[tuple[int, str], set[int]] = {}
    for move in program.moves:
        users.setdefault((move.source, move.value), set()).add(move.target)

    def kind(move: Move) -> str:
        """The colour: what comes from the caller, or goes only there, is no portal, but as other inputs."""
        return "flow" if move.source == -1 or users[move.source, move.value] == {n} else "arc"

    over = [(move.value, kind(move), move.source, move.target) for move in program.moves if move.portal]
    under = [(program.state(loan.state).path, "loan", loan.home, loan.user) for loan in program.loans]
    return _Row(first, last, _arcs(_inside(over, first, last)), _arcs(_inside(under, first, last)))


def _inside(moves: Iterable[tuple[str, str, int, int]], first: int, last: int) -> Iterator[tuple[str, str, int, int]]:
    """The parts of moves that a row shows.

    >>> list(_inside([("a", "arc", 0, 2), ("b", "arc", 1, 9), ("c", "arc", 5, 7)], 2, 4))
    [('a', 'arc', 1, 2), ('b', 'arc', 1, 5)]
    """
    for name, kind, source, target in moves:
        if source <= last and target >= first:
            yield name, kind, max(source, first - 1), min(target, last + 1)


def _values(program: Program) -> dict[tuple[int, int], list[str]]:
    """The values that move between each two stages."""
    between: dict[tuple[int, int], list[str]] = {}
    for move in program.moves:
        between.setdefault((move.source, move.target), []).append(move.value)
    return between


def _arcs(moves: Iterable[tuple[str, str, int, int]]) -> tuple[_Arc, ...]:
    """Arcs for moves (name, kind, source, target): one for all targets of a value, and for all values of a kind that
    go the same way. Short ones lie lowest, as low as nothing is in the way."""
    users: dict[tuple[int, str, str], set[int]] = {}
    for name, kind, source, target in moves:
        users.setdefault((source, kind, name), set()).add(target)
    names: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for (source, kind, name), targets in users.items():
        names.setdefault((kind, (source, *sorted(targets))), []).append(name)
    arcs: list[_Arc] = []
    for kind, way in sorted(names, key=lambda arc: (arc[1][-1] - arc[1][0], arc[1], arc[0])):
        source, *ends = way
        met = {arc.level for arc in arcs if arc.source < ends[-1] and source < arc.targets[-1]}
        level = next(level for level in range(len(arcs) + 1) if level not in met)
        arcs.append(_Arc(source, tuple(ends), _some(names[kind, way], 3), kind, level))
    return tuple(arcs)


def _levels(arcs: Iterable[_Arc]) -> int:
    return max((arc.level + 1 for arc in arcs), default=0)


def _places(
    program: Program, rows: Sequence[_Row], between: Mapping[tuple[int, int], Sequence[str]]
) -> tuple[tuple[float, float], ...]:
    """The place and width of each column, from left to right, the gap after each as wide as the names need that stand
    there in any row."""
    places: list[tuple[float, float]] = []
    x = LEFT
    for column in range(len(rows[0].indices)):
        width = gap = 0.0
        for row in (row for row in rows if column < len(row.indices)):
            index = row.indices[column]
            inside = row.first <= index <= row.last
            width = max(width, _card_width(program, program.stages[index]) if inside else _pill(program, row, index)[1])
            names = [*_labels(program, between.get((index, index + 1), []))]
            names += (arc.label for arc in (*row.over, *row.under) if arc.source == index)
            gap = max([gap, *(text_width(name, 11, mono=True) + 30 for name in names)])
        places.append((x, width))
        x += width + (gap or 40.0)
    return tuple(places)


def _cards(program: Program, row: _Row, places: Sequence[tuple[float, float]], y: float) -> dict[int, _Card]:
    lines = max((len(_modules(stage)) for stage in program.stages), default=0)
    lines += any(_recompute(stage) for stage in program.stages)
    height = 78 + LINE * lines
    cards: dict[int, _Card] = {}
    for index, (x, width) in zip(row.indices, places, strict=False):
        if row.first <= index <= row.last:
            cards[index] = _Card(x, width, y, height, f"stage {index}")
        else:
            name, width = _pill(program, row, index)
            cards[index] = _Card(x, width, y + height / 2 - 15, 30, name)
    return cards


def _pill(program: Program, row: _Row, index: int) -> tuple[str, float]:
    """The name and the width of what stands for the caller, or for the stages of the rows before or after."""
    n = len(program.stages)
    if index < 0:
        return "inputs", PILL
    if index == n:
        taken, outputs = program.graph.taken, {output.value for output in program.graph.outputs}
        return "epilogue" if taken and taken >= outputs else "outputs", PILL
    others = range(row.first) if index < row.first else range(index, n)
    name = ("stage " if len(others) == 1 else "stages ") + ranges(others)
    return name, text_width(name, 11.5) + 24


def _card_width(program: Program, stage: Stage) -> float:
    head = text_width(f"stage {stage.index}", 14) + text_width(joined(stage.devices), 11.5) + 24
    modules = [text_width(name, 11, mono=True) for name in _modules(stage)]
    return max(head, *modules, *(text_width(s, 11.5) for s in (_counts(program, stage), _recompute(stage)))) + 32


def _card(program: Program, stage: Stage, card: _Card) -> Iterator[str]:
    for class_ in ("card", "line-stroke"):
        yield tag("rect", x=card.x, y=card.y, width=card.width, height=card.height, rx=10, class_=class_)
    x, y = card.x + 16, card.y + 26
    yield words(card.name, x, y, size=14, font_weight=600)
    yield words(joined(stage.devices), card.right - 16, y, "flow", 11.5, text_anchor="end", font_weight=600)
    for line, name in enumerate(_modules(stage)):
        yield words(name, x, y + 22 + LINE * line, "ink mono", 11)
    base = card.y + card.height - 14
    yield words(_counts(program, stage), x, base - (LINE if _recompute(stage) else 0), "soft", 11.5)
    if _recompute(stage):
        yield words(_recompute(stage), x, base, "soft", 11.5)


def _modules(stage: Stage) -> list[str]:
    """The modules whose code runs here, outermost names that tell them apart from other code; ops outside of any
    module by their own name."""
    names = list(dict.fromkeys(op.origin.module or op.name for op in stage.ops))
    many = len(names) > MODULES
    while len(_ranges(names) if many else names) > MODULES and any("." in name for name in names):
        deepest = max(name.count(".") for name in names)
        short = (name.rsplit(".", 1)[0] if name.count(".") == deepest else name for name in names)
        names = list(dict.fromkeys(short))
    names = _ranges(names) if many else names
    names = [name if len(name) <= LONGEST else "…" + name[-LONGEST + 1 :] for name in names]
    return names if len(names) <= MODULES else [*names[: MODULES - 1], f"… {len(names) - MODULES + 1} more"]


def _ranges(names: Sequence[str]) -> list[str]:
    """The names, with those of neighbours in a list of modules as one.

    >>> _ranges(["norm", "blocks.6", "blocks.7", "blocks.9", "3", "4"])
    ['norm', 'blocks.6-7', 'blocks.9', '3-4']
    """
    found: list[str] = []
    for parent, run in groupby(names, _list_of):
        if parent is None:
            found += run
        else:
            numbers = ranges(int(name.removeprefix(parent)) for name in run)
            found += (parent + part for part in numbers.split(", "))
    return found


def _list_of(name: str) -> str | None:
    """What stands before the number of an item of a list of modules; None for another module."""
    parent, dot, last = name.rpartition(".")
    return parent + dot if last.isdecimal() else None


def _counts(program: Program, stage: Stage) -> str:
    return f"{_count(len(stage.ops), 'op')}, {_count(_parameters(program, stage), 'parameter')}"


def _parameters(program: Program, stage: Stage) -> int:
    sizes = {state.name: state.type for state in program.graph.states if state.kind == "parameter"}
    return sum(getattr(sizes[name], "numel", lambda _: 0)({}) for name in stage.states if name in sizes)


def _count(count: int, noun: str) -> str:
    """
    >>> _count(1, "op"), _count(2345, "op"), _count(1_234_567, "op")
    ('1 op', '2,345 ops', '1.23 M ops')
    """
    number = f"{count / 1e9:.2f} G" if count >= 1e9 else f"{count / 1e6:.2f} M" if count >= 1e6 else f"{count:,}"
    return f"{number} {noun}" + ("" if count == 1 else "s")


def _recompute(stage: Stage) -> str:
    says = {"never": "", "except_last": "recomputes all but the last", "always": "recomputes"}
    return says.get(stage.checkpoint, stage.checkpoint)


def _facts(program: Program) -> str:
    stages = _count(len(program.stages), "stage")
    devices = _count(len({device for stage in program.stages for device in stage.devices}), "device")
    parameters = _count(sum(_parameters(program, stage) for stage in program.stages), "parameter")
    portals = f", {_count(len(program.portals), 'portal')}" if program.portals else ""
    return f"{stages} on {devices}, {parameters}{portals}"


def _end(card: _Card) -> Iterator[str]:
    yield tag("rect", x=card.x, y=card.y, width=card.width, height=card.height, rx=15, class_="line-stroke")
    yield words(card.name, card.x + card.width / 2, card.middle + 4, "soft", 11.5, text_anchor="middle")


def _labels(program: Program, names: Sequence[str]) -> list[str]:
    """What stands at an arrow: the names, and the type if there is one value."""
    if not names:
        return []
    return [_some(names, 2), str(program.types[names[0]]) if len(names) == 1 else f"{len(names)} values"]


def _some(names: Sequence[str], most: int) -> str:
    return ", ".join(names[:most]) + (f", +{len(names) - most}" if len(names) > most else "")


def _flow(program: Program, source: _Card, target: _Card, names: Sequence[str]) -> Iterator[str]:
    """The arrow between neighbours."""
    if not names:
        return
    y, middle = source.middle, (source.right + target.x) / 2
    yield tag("line", x1=source.right + 3, y1=y, x2=target.x - 9, y2=y, class_="flow-stroke", stroke_width=1.8)
    yield arrow_head(target.x - 3, y, "flow", (-1, 0))
    name, type_ = _labels(program, names)
    yield words(name, middle, y - 8, "ink mono", 11, text_anchor="middle")
    yield words(type_, middle, y + 17, "soft mono", 9.5, text_anchor="middle")


def _bow(row: _Row, cards: Mapping[int, _Card], arcs: Sequence[_Arc], arc: _Arc, up: bool) -> Iterator[str]:
    """An arc over the cards, or under them, with a branch to each target. Of several at a card the longest leaves at
    the left and arrives at the right, so that they do not cross there."""
    source = cards[arc.source]
    leaving = sorted((a for a in arcs if a.source == arc.source), key=lambda a: a.level)
    x1 = source.right - 20 - _pitch(source, leaving) * leaving.index(arc)
    level, r, back = _level(cards[row.first], arc, up), 12.0, -1.0 if up else 1.0
    begin, bend = _edge(source, up) + back * 3, level - back * r
    path = f"M {x1:.2f} {begin:.2f} V {bend:.2f} Q {x1:.2f} {level:.2f} {x1 + r:.2f} {level:.2f}"
    for index in arc.targets:
        target = cards[index]
        arriving = sorted((a for a in arcs if index in a.targets), key=lambda a: a.level)
        x2 = target.x + 20 + _pitch(target, arriving) * arriving.index(arc)
        end = _edge(target, up)
        path += f" H {x2 - r:.2f} Q {x2:.2f} {level:.2f} {x2:.2f} {bend:.2f} V {end + back * 9:.2f}"
        path += "" if index == arc.targets[-1] else f" M {x2 - r:.2f} {level:.2f}"  # go on from the branch
        yield arrow_head(x2, end + back * 3, arc.kind, (0, back))
    dash = None if up else "5 4"
    yield tag("path", d=path, class_=f"{arc.kind}-stroke", stroke_width=1.8, stroke_dasharray=dash)


def _pitch(card: _Card, arcs: Sequence[_Arc]) -> float:
    """How far apart arcs stand that leave a card, or that arrive."""
    return min(12.0, (card.width - 40) / max(len(arcs) - 1, 1))


def _name(row: _Row, cards: Mapping[int, _Card], arc: _Arc, up: bool) -> Iterator[str]:
    """The name of an arc, in the gap after its source, where no arc goes up or down."""
    middle, level = (cards[arc.source].right + cards[arc.source + 1].x) / 2, _level(cards[row.first], arc, up)
    wide = text_width(arc.label, 11, mono=True) + 10
    yield tag("rect", x=middle - wide / 2, y=level - 9, width=wide, height=18, class_="page")
    yield words(arc.label, middle, level + 4, f"{arc.kind} mono", 11, text_anchor="middle")


def _level(card: _Card, arc: _Arc, up: bool) -> float:
    """The height that an arc runs at, over or under the cards of a row, of which `card` is one."""
    away = 22 + LEVEL * arc.level
    return card.y - away if up else card.y + card.height + away


def _edge(card: _Card, up: bool) -> float:
    """Where an arc touches a card."""
    return card.y if up else card.y + card.height

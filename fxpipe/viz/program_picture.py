"""A program as a picture: the stages as cards with their devices, and the values that move between them.

          ╭──────── skip ────────╮              portals above: values that pass over stages
inputs   ╭┴────────╮         ╭───▼─────╮      (inputs and outputs that do so have another colour)
image  ─▶│ stage 0 │── x ───▶│ stage 2 │─▶ y    between neighbours, arrows
         ╰┬────────╯         ╰───▲─────╯
          ╰┄┄┄┄ embed.weight ┄┄┄┄╯              loans below: tensors of the model that stages share
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from fxpipe.ir.plan.hybrid_plan import joined, ranges
from fxpipe.ir.program.program import Program, Stage
from fxpipe.viz.svg_elements import arrow_head, page, tag, text_width, words

LEVEL, LINE = 26.0, 16.0  # heights: between arcs, of a line in a card
PILL = 60.0  # the width of what stands for the caller
MODULES, LONGEST = 5, 26  # as many of a stage's modules, and letters of each, as a card shows


@dataclass(frozen=True)
class _Card:
    """A stage's place; the caller stands at index -1 with what goes in and at n with what comes out."""

    index: int
    x: float
    width: float
    y: float
    height: float

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
    level: int


def draw(program: Program) -> str:
    """The picture as the text of an SVG file."""
    between = _values(program)
    over = _arcs((move.value, move.source, move.target) for move in program.moves if move.portal)
    under = _arcs((program.state(loan.state).path, loan.home, loan.user) for loan in program.loans)
    cards = _cards(program, between, [*over, *under], top=84 + LEVEL * _levels(over) + (14 if over else 0))
    lines = [words(program.graph.model, 24, 36, size=17, font_weight=600)]
    lines.append(words(_facts(program), 24, 57, "soft", 12.5))
    for arcs, up in ((over, True), (under, False)):
        lines += [mark for arc in arcs for mark in _bow(cards, arcs, arc, up)]
        lines += [mark for arc in arcs for mark in _name(cards, arc, up)]  # later, on top of lines that cross
    for index in range(-1, len(program.stages)):
        lines += _flow(program, cards[index], cards[index + 1], between.get((index, index + 1), []))
    lines += [mark for stage in program.stages for mark in _card(program, stage, cards[stage.index])]
    lines += [*_caller(cards[-1], "inputs"), *_caller(cards[len(program.stages)], "outputs")]
    last = cards[len(program.stages)]
    height = last.y + last.height + LEVEL * _levels(under) + (18 if under else 0) + 28
    return page(last.right + 24, height, program.graph.model, lines)


def _values(program: Program) -> dict[tuple[int, int], list[str]]:
    """The values that move between each two stages."""
    between: dict[tuple[int, int], list[str]] = {}
    for move in program.moves:
        between.setdefault((move.source, move.target), []).append(move.value)
    return between


def _arcs(moves: Iterable[tuple[str, int, int]]) -> list[_Arc]:
    """Arcs for moves (name, source, target): one for all targets of a value, and for all values that go the same way.
    Short ones lie lowest, as low as nothing is in the way."""
    targets: dict[tuple[int, str], list[int]] = {}
    for name, source, target in moves:
        targets.setdefault((source, name), []).append(target)
    names: dict[tuple[int, ...], list[str]] = {}
    for (source, name), ends in targets.items():
        names.setdefault((source, *sorted(ends)), []).append(name)
    arcs: list[_Arc] = []
    for source, *ends in sorted(names, key=lambda way: (way[-1] - way[0], way)):
        met = {arc.level for arc in arcs if arc.source < ends[-1] and source < arc.targets[-1]}
        level = next(level for level in range(len(arcs) + 1) if level not in met)
        arcs.append(_Arc(source, tuple(ends), _some(names[source, *ends], 3), level))
    return arcs


def _levels(arcs: Iterable[_Arc]) -> int:
    return max((arc.level + 1 for arc in arcs), default=0)


def _cards(
    program: Program, between: Mapping[tuple[int, int], Sequence[str]], arcs: Sequence[_Arc], top: float
) -> dict[int, _Card]:
    """The cards from left to right, the gap after each as wide as the names need that stand there."""
    n = len(program.stages)
    lines = max((len(_modules(stage)) for stage in program.stages), default=0)
    lines += any(_recompute(stage) for stage in program.stages)
    height = 78 + LINE * lines
    cards: dict[int, _Card] = {}
    x = 24.0
    for index in range(-1, n + 1):
        width = _card_width(program, program.stages[index]) if 0 <= index < n else PILL
        cards[index] = _Card(index, x, width, top, height)
        names = [*_labels(program, between.get((index, index + 1), [])), *(a.label for a in arcs if a.source == index)]
        x += width + max([text_width(name, 11, mono=True) + 30 for name in names], default=40.0)
    return cards


def _card_width(program: Program, stage: Stage) -> float:
    head = text_width(f"stage {stage.index}", 14) + text_width(joined(stage.devices), 11.5) + 24
    modules = [text_width(name, 11, mono=True) for name in _modules(stage)]
    return max(head, *modules, *(text_width(s, 11.5) for s in (_counts(program, stage), _recompute(stage)))) + 32


def _card(program: Program, stage: Stage, card: _Card) -> Iterator[str]:
    for class_ in ("card", "line-stroke"):
        yield tag("rect", x=card.x, y=card.y, width=card.width, height=card.height, rx=10, class_=class_)
    x, y = card.x + 16, card.y + 26
    yield words(f"stage {stage.index}", x, y, size=14, font_weight=600)
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


def _caller(card: _Card, name: str) -> Iterator[str]:
    yield tag("rect", x=card.x, y=card.middle - 15, width=card.width, height=30, rx=15, class_="line-stroke")
    yield words(name, card.x + card.width / 2, card.middle + 4, "soft", 11.5, text_anchor="middle")


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


def _bow(cards: Mapping[int, _Card], arcs: Sequence[_Arc], arc: _Arc, up: bool) -> Iterator[str]:
    """An arc over the cards, or under them, with a branch to each target. Of several at a card the longest leaves at
    the left and arrives at the right, so that they do not cross there."""
    source = cards[arc.source]
    leaving = sorted((a for a in arcs if a.source == arc.source), key=lambda a: a.level)
    x1 = source.right - 20 - _pitch(source, leaving) * leaving.index(arc)
    level, r, back = _level(source, arc, up), 12.0, -1.0 if up else 1.0
    kind, dash = _kind(cards, arc, up), None if up else "5 4"
    begin, bend = _edge(source, up) + back * 3, level - back * r
    path = f"M {x1:.2f} {begin:.2f} V {bend:.2f} Q {x1:.2f} {level:.2f} {x1 + r:.2f} {level:.2f}"
    for target in (cards[index] for index in arc.targets):
        arriving = sorted((a for a in arcs if target.index in a.targets), key=lambda a: a.level)
        x2 = target.x + 20 + _pitch(target, arriving) * arriving.index(arc)
        end = _edge(target, up)
        path += f" H {x2 - r:.2f} Q {x2:.2f} {level:.2f} {x2:.2f} {bend:.2f} V {end + back * 9:.2f}"
        path += "" if target.index == arc.targets[-1] else f" M {x2 - r:.2f} {level:.2f}"  # go on from the branch
        yield arrow_head(x2, end + back * 3, kind, (0, back))
    yield tag("path", d=path, class_=f"{kind}-stroke", stroke_width=1.8, stroke_dasharray=dash)


def _kind(cards: Mapping[int, _Card], arc: _Arc, up: bool) -> str:
    """The colour of an arc: what comes from the caller, or goes only there, is no portal, but as other inputs."""
    caller = arc.source == -1 or arc.targets == (max(cards),)
    return "loan" if not up else "flow" if caller else "arc"


def _pitch(card: _Card, arcs: Sequence[_Arc]) -> float:
    """How far apart arcs stand that leave a card, or that arrive."""
    return min(12.0, (card.width - 40) / max(len(arcs) - 1, 1))


def _name(cards: Mapping[int, _Card], arc: _Arc, up: bool) -> Iterator[str]:
    """The name of an arc, in the gap after its source, where no arc goes up or down."""
    source = cards[arc.source]
    middle, level = (source.right + cards[arc.source + 1].x) / 2, _level(source, arc, up)
    wide = text_width(arc.label, 11, mono=True) + 10
    yield tag("rect", x=middle - wide / 2, y=level - 9, width=wide, height=18, class_="page")
    yield words(arc.label, middle, level + 4, f"{_kind(cards, arc, up)} mono", 11, text_anchor="middle")


def _level(card: _Card, arc: _Arc, up: bool) -> float:
    """The height that an arc runs at."""
    away = 22 + LEVEL * arc.level
    return card.y - away if up else card.y + card.height + away


def _edge(card: _Card, up: bool) -> float:
    """Where an arc touches a card; the caller's pills are lower than cards."""
    half = 15 if card.width == PILL else card.height / 2
    return card.middle - half if up else card.middle + half

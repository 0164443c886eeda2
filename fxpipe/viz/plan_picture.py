"""A plan as a picture: a card for each stage, with its devices, its ops, and what it recomputes. An arrow at the end of
a row goes on in the next row."""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.ir.plan.hybrid_plan import joined
from fxpipe.ir.plan.plan import Plan, StagePlan
from fxpipe.ir.units import count

from .svg_elements import WIDE, arrow_head, page, tag, text_width, words

TOP, HEIGHT, BELOW, ARROW, LEFT = 84.0, 112.0, 28.0, 40.0, 24.0
LONGEST = 26  # letters of a name that a card shows


def draw(plan: Plan) -> str:
    """The picture as the text of an SVG file."""
    stages = count(len(plan.stages), "stage", "stages")
    facts = f"{stages}, {count(plan.chunks, 'micro-batch', 'micro-batches')}, {plan.schedule.partition(':')[0]}"
    lines = [words(plan.model, LEFT, 36, size=17, font_weight=600), words(facts, LEFT, 57, "soft", 12.5)]
    x, y, ends = LEFT, TOP, [LEFT + text_width(text, 17) for text in (plan.model, facts)]
    for index, stage in enumerate(plan.stages):
        told = _told(stage)
        head = text_width(f"stage {index}", 14) + 24 + text_width(joined(stage.devices), 11.5)
        wide = 40 + max(head, *(text_width(text, 11.5) for text in told))
        if index:
            lines += _arrow(x, y + HEIGHT / 2)
            x += ARROW
            ends.append(x)
        if index and x + wide + ARROW + LEFT > WIDE:
            x, y = LEFT, y + HEIGHT + BELOW
            lines += _arrow(x, y + HEIGHT / 2)
            x += ARROW
        lines += _card(index, stage, told, x, y, wide)
        x += wide
        ends.append(x)
    return page(max(ends) + LEFT, y + HEIGHT + BELOW, plan.model, lines)


def _told(stage: StagePlan) -> list[str]:
    """The lines of a card below its head."""
    ops = [count(len(stage.ops), "op", "ops")]
    if stage.ops:
        ops.append(_short(stage.ops[0]) + (f" … {_short(stage.ops[-1])}" if len(stage.ops) > 1 else ""))
    says = {"never": "recomputes nothing", "except_last": "recomputes all but the last", "always": "recomputes"}
    again = says.get(stage.checkpoint, "recomputes what is cheap")
    cut = f", each op over {stage.tensor_parallel}" if stage.tensor_parallel > 1 else ""
    return [*ops, again + (", offloads" if stage.offload else "") + cut]


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else "…" + name[-LONGEST + 1 :]


def _card(index: int, stage: StagePlan, told: list[str], x: float, y: float, wide: float) -> Iterator[str]:
    hint = tag("title", ", ".join(stage.devices))
    for class_ in ("card", "line-stroke"):
        yield tag("rect", hint, x=x, y=y, width=wide, height=HEIGHT, rx=10, class_=class_)
    yield words(f"stage {index}", x + 16, y + 26, size=14, font_weight=600)
    yield words(joined(stage.devices), x + wide - 16, y + 26, "flow", 11.5, text_anchor="end", font_weight=600)
    for line, text in enumerate(told):
        yield words(text, x + 16, y + 52 + 18 * line, "soft", 11.5)


def _arrow(x: float, y: float) -> Iterator[str]:
    yield tag("line", x1=x + 3, y1=y, x2=x + ARROW - 9, y2=y, class_="flow-stroke", stroke_width=1.8)
    yield arrow_head(x + ARROW - 3, y, "flow", (-1, 0))

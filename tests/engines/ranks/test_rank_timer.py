"""What ranks have noted becomes one timeline."""

from __future__ import annotations

from fxpipe.engines.ranks.rank_timer import Notes, carried, together
from fxpipe.ir.program.device_programs import Message
from fxpipe.ir.timeline import Span


def test_a_link_carries_one_message_after_the_other() -> None:
    """The picture at the top of the file. `a` has arrived when it is taken; `b` when `c` is, for it came before."""
    a, b, c = (Message(name, 0, 1, 0) for name in "abc")
    spans = list(carried("0 -> 1", [(0, 15, a), (4, 23, b), (12, 19, c)]))
    assert [(span.label, span.start, span.end) for span in spans] == [("a", 0, 15), ("b", 15, 19), ("c", 19, 19)]


def test_notes_are_put_together() -> None:
    x, dx = Message("x", 0, 1, 0), Message("x", 1, 0, 0, gradient=True)
    first = Notes(10.0, (9.5, 17.0), (Span("cpu:0", 11, 12, "F", 0, 0),), {x: 12.0}, {dx: 16.0}, {"cpu:0": ((0.0, 8),)})
    second = Notes(9.0, (8.5, 15.5), (Span("cpu:1", 14, 15, "B", 1, 0),), {dx: 15.0}, {x: 13.5}, {"cpu:1": ((0.0, 4),)})
    found = together("by hand", (("cpu:0",), ("cpu:1",)), (first, second))
    assert [(s.where, s.start, s.end, s.label) for s in found.spans] == [
        ("cpu:0", 2, 3, ""),
        ("cpu:1", 5, 6, ""),
        ("cpu:0 -> cpu:1", 3, 4.5, "x"),
        ("cpu:1 -> cpu:0", 6, 7, "gradient of x"),
    ]
    assert found.links == ("cpu:0 -> cpu:1", "cpu:1 -> cpu:0")
    assert found.high_water == (8, 4)
    assert found.window == found.call == (-0.5, 8)

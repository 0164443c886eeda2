"""What is moved to cut and to join, by hand: numbers of one byte."""

from __future__ import annotations

from benchmarks.copy_cost import handling
from fxpipe.ir.operators.operators import OperatorGraph
from fxpipe.ir.operators.strategy import Config, Strategy
from fxpipe.planning.operators.models.operator_kinds import elementwise, features, linear

X = features("x", 4, 6)
WHOLE, ROWS, COLUMNS = Config((1, 1), (0,)), Config((2, 1), (0, 1)), Config((1, 2), (0, 1))


def moved(*configs: Config) -> dict[tuple[int, ...], float]:
    """Of an elementwise operator that a linear layer of 2 channels reads."""
    a = elementwise("a", X)
    return dict(handling(OperatorGraph("small", (X, a, linear("b", a, 2)), element=1), Strategy((WHOLE, *configs))))


def test_what_is_read_as_it_was_made_is_not_moved() -> None:
    assert moved(WHOLE, WHOLE) == moved(ROWS, ROWS) == {}


def test_pieces_are_joined() -> None:
    """All of the 24 numbers are read and written; each half gets one gradient, as large as itself."""
    assert moved(ROWS, WHOLE) == {(0, 2, 0): 48}


def test_gradients_of_pieces_are_put_into_the_whole_and_added_up() -> None:
    """Two halves of 12: zeros of 24, and 12 read and written, each; then one sum of two times 24 numbers."""
    assert moved(WHOLE, ROWS) == {(1, 1, 0): 2 * (24 + 2 * 12) + 3 * 24}


def test_who_reads_all_of_all_parts_joins_them() -> None:
    """Both parts of b read both halves of a, and so each half has two gradients."""
    assert moved(ROWS, COLUMNS) == {(0, 2, 0): 48, (0, 2, 1): 48, (1, 1, 0): 36, (1, 1, 1): 36}


def test_gradients_of_several_readers_are_added_up() -> None:
    a = elementwise("a", X)
    graph = OperatorGraph("two", (X, a, elementwise("b", a), elementwise("c", a)), element=4)
    assert handling(graph, Strategy((WHOLE,) * 4)) == {(1, 2, 0): 3 * 24 * 4}

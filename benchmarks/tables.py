"""Tables of benchmarks whose rows take a while: each is printed as soon as it is there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NUMBER, TEXT = 8, 14  # characters of a column, at least
APART = "  "

Row = Sequence[object]


def show(title: str, heads: Sequence[str], rows: Iterable[Row]) -> list[Row]:
    """Print a title, the heads, and each row as it comes; returns the rows. Columns are as wide as their heads and
    their first cells, text on the left and numbers on the right; a float has two digits, None is left empty."""
    shown: list[Row] = []
    widths: list[int] = []
    print(f"{title}\n", flush=True)
    for row in rows:
        cells = [text(value) for value in row]
        if not shown:
            least = [TEXT if isinstance(value, str) else NUMBER for value in row]
            widths = [max(sizes) for sizes in zip(least, map(len, heads), map(len, cells), strict=True)]
            print(_line(heads, row, widths))
        print(_line(cells, row, widths), flush=True)
        shown.append(row)
    print(flush=True)
    return shown


def text(value: object) -> str:
    """
    >>> text(None), text(2.0), text(3), text("DP")
    ('', '2.00', '3', 'DP')
    """
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def _line(cells: Sequence[str], row: Row, widths: Sequence[int]) -> str:
    """The cells, each on the side of its column where the value of `row` is."""
    sides = (
        cell.ljust(width) if isinstance(value, str) else cell.rjust(width)
        for cell, value, width in zip(cells, row, widths, strict=True)
    )
    return APART.join(sides).rstrip()

"""How bytes, seconds and counts are written everywhere: with three figures and a unit."""

from __future__ import annotations


def show_bytes(count: float) -> str:
    """Bytes in decimal units, as device makers count them.

    >>> show_bytes(512), show_bytes(1_500_000), show_bytes(-16e9)
    ('512 B', '1.5 MB', '-16 GB')
    """
    return _scaled(count, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")), "B")


def show_seconds(seconds: float) -> str:
    """A duration.

    >>> show_seconds(0), show_seconds(0.0000123), show_seconds(0.25), show_seconds(90)
    ('0 s', '12.3 us', '250 ms', '90 s')
    """
    if seconds == 0 or abs(seconds) >= 1:
        return f"{seconds:.3g} s"
    return _scaled(seconds * 1e9, ((1e6, "ms"), (1e3, "us")), "ns")


def _scaled(value: float, units: tuple[tuple[float, str], ...], least: str) -> str:
    for scale, unit in units:
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g} {least}"


def count(n: int, one: str, many: str) -> str:
    """A number of things in words.

    >>> count(1, "stage", "stages"), count(2, "stage", "stages")
    ('1 stage', '2 stages')
    """
    return f"{n} {one if n == 1 else many}"

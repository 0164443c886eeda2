"""The import lines of a generated file, in the order that isort gives them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence


def import_blocks(modules: Iterable[str], others: Sequence[str], ours: Sequence[str]) -> list[str]:
    """`modules` are imported whole, the standard library's before the rest; after these come the lines `others` (of the
    rest) and `ours`, each block apart."""
    lines = {name: f"import {name}" + (" as F" if name == "torch.nn.functional" else "") for name in sorted(modules)}
    standard = [line for name, line in lines.items() if name.partition(".")[0] in sys.stdlib_module_names]
    rest = [line for line in lines.values() if line not in standard]
    blocks = [block for block in (standard, [*rest, *others], ours) if block]
    return "\n\n".join("\n".join(block) for block in blocks).split("\n")

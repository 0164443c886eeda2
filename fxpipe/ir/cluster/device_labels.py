"""Device labels: a kind and, mostly, a number, as in "cpu:0", "cuda:1" or, in a cluster elsewhere, "V100:3".

Labels go into generated source, file names and pictures, and they come from files that others have written. So all
labels follow one grammar, in which no character has a meaning to Python, HTML or a shell.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from fxpipe.ir.dataclass_json import Rule

_LABEL = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,31}(:(0|[1-9][0-9]{0,5}))?")


def is_label(text: Any) -> bool:
    """Whether the text is a device label.

    >>> [is_label(text) for text in ("cpu:0", "cuda", "V100:12", "cpu:01", "cpu:0\\n", 'cpu:0"', "")]
    [True, True, True, False, False, False, False]
    """
    return isinstance(text, str) and _LABEL.fullmatch(text) is not None


Label = Annotated[str, Rule(is_label, "a device label, such as 'cpu:0' or 'cuda:1'")]

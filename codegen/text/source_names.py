"""How the user's names, strings and lines enter generated source: through the functions of this file only.

A model's strings may hold quotes, newlines or an attacker's code, its modules may be called `class`, `__x` or
`my-block`, its line may end in `# noqa`. Whatever they hold, what comes out is one name, one string literal, or the
rest of one comment line.
"""

from __future__ import annotations

import builtins
import keyword
import re
import unicodedata

from fxpipe.runtime.stage import own_names

# What generated files themselves call things.
_OURS = ("self", "draw", "torch", "F", "nn", "math", "operator", "Tensor", "Stage", "Draws", "_")
RESERVED = frozenset((*_OURS, *keyword.kwlist, *dir(builtins)))
# The attributes of every stage: a part of the model with such a name is read with an index, `self["device"]`.
STAGE_NAMES = own_names()
# Letters that look like digits in most fonts; linters refuse them.
AMBIGUOUS = frozenset("lOI")

_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_STRING_OR_COMMENT = re.compile(r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|\#.*""")


def identifier(name: str) -> str:
    """A Python variable for the value `name`; the same name always gives the same variable.

    >>> identifier("x_1"), identifier("input"), identifier("class"), identifier("_h"), identifier("l")
    ('x_1', 'input_', 'class_', 'h', 'l_')
    """
    plain = unicodedata.normalize("NFKC", name).lstrip("_")
    if not plain.isidentifier():
        plain = "".join(char if f"v{char}".isidentifier() else "_" for char in plain)
        plain = plain if plain.isidentifier() else f"v{plain}"
    return plain + "_" if plain in RESERVED or plain in AMBIGUOUS else plain


def string(text: str) -> str:
    """A string literal in ASCII, in the quotes that need fewer escapes.

    >>> print(string('say "hi"'), string("a\\nb"))
    'say "hi"' "a\\nb"
    """
    quote = "'" if text.count('"') > text.count("'") else '"'
    plain = text.isascii() and text.isprintable() and quote not in text and "\\" not in text
    return quote + (text if plain else "".join(_escape(char, quote) for char in text)) + quote


def quoted(text: str) -> str:
    """Text between the double quotes of a string literal, be they one or three.

    >>> print(quoted('cpu:0\"\"\"'))
    cpu:0\\"\\"\\"
    """
    return "".join(_escape(char, '"') for char in text)


def _escape(char: str, quote: str) -> str:
    if char == quote:
        return "\\" + char
    if char in _ESCAPES:
        return _ESCAPES[char]
    if " " <= char <= "~":
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def member(owner: str, name: str) -> str:
    """The attribute `name` of a value: `x.T`, or getattr for a name that Python cannot spell.

    >>> member("x", "shape"), member("x", "my-part")
    ('x.shape', 'getattr(x, "my-part")')
    """
    return f"{owner}.{name}" if spells(name) else f"getattr({owner}, {string(name)})"


def state_path(path: str) -> str:
    """The expression for a tensor of the model in its stage. Numbers index, and so do names that Python cannot spell
    or that every stage has already.

    >>> state_path("layers.0.weight"), state_path("my-block.device.weight")
    ('self.layers[0].weight', 'self["my-block"]["device"].weight')
    """
    text = "self"
    for part in path.split("."):
        if part.isascii() and part.isdigit() and str(int(part)) == part:
            text = f"{text}[{part}]"
        elif spells(part) and part not in STAGE_NAMES:
            text = f"{text}.{part}"
        else:
            text = f"{text}[{string(part)}]"
    return text


def spells(part: str) -> bool:
    """Whether `x.part` reads the attribute `part`: inside a class, Python changes `__part`."""
    mangled = part.startswith("__") and not part.endswith("__")
    normal = unicodedata.normalize("NFKC", part) == part  # Python reads `ﬁ` as `fi`
    return normal and part.isidentifier() and not keyword.iskeyword(part) and not mangled


def code_comment(code: str) -> str:
    """The user's line for a comment: without its own comment, on one line, nothing that a tool could obey."""
    return prose(_STRING_OR_COMMENT.sub(lambda found: found[1] or "", code))


def prose(text: str) -> str:
    """Text for a comment: one line of printable characters; a `#` is escaped, so that no tool takes what follows for
    an instruction.

    >>> prose("a\\nb  # noqa")
    'a b \\\\x23 noqa'
    """
    words = " ".join(text.split())
    if not words.isprintable():
        words = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in words)
    return words.replace("#", "\\x23")


def doc_prose(text: str) -> str:
    """Text for a docstring: as `prose`, and it cannot end the docstring."""
    return prose(text).replace("\\", "\\\\").replace('"', "'")


def clip(text: str, width: int) -> str:
    """At most `width` columns, the cut marked by three dots."""
    if columns(text) <= width:
        return text
    text = text[: width - 4]
    while columns(text) > width - 4:
        text = text[:-1]
    return text.rstrip() + " ..."


def columns(text: str) -> int:
    """Columns on a screen: wide East Asian characters take two."""
    return len(text) + (0 if text.isascii() else sum(unicodedata.east_asian_width(char) in "WF" for char in text))

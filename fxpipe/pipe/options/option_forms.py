"""The forms that the value of an option may have: how an error names them, how a value is checked, and how the command
line reads a value from text.

    Option("checkpoint", "what to recompute", (one_of("never", "always"), many(whole(0), "a set of stages")), {0, 2})

    checkpoint is 'allways': write 'never', 'always', or a set of stages, as in checkpoint={0, 2}; did you mean
    'always'?
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxpipe.errors import PlanError, did_you_mean

WIDTH = 60  # characters of a value that an error shows


class Default(str):
    """The default word of an option. Its type tells it from the same word given by the user, which may contradict a
    plan."""


@dataclass(frozen=True)
class Form:
    """One form of a value.

    - `text`: completes "write ...".
    - `take`: returns the value as the rest of fxpipe needs it; raises TypeError or ValueError if it has another form.
    - `read`: parses a value from text; None if the command line has no text for this form.
    - `words`: returns the words that a value may consist of.
    """

    text: str
    take: Callable[[Any], Any]
    read: Callable[[str], Any] | None = None
    words: Callable[[], Collection[str]] = tuple


@dataclass(frozen=True)
class Option:
    """An option and the forms of its value.

    - `about`: its line in the help of the command line.
    - `example`: a value for errors and help.
    - `unset`: whether None means that the option was left out.
    - `default`: its value if it was left out.
    - `why`: why that is the default; and, behind a semicolon, what it costs.
    - `instead`: returns the value that is meant by one that is none of its own, and how Python writes it; or None.
    """

    name: str
    about: str
    forms: tuple[Form, ...]
    example: Any = None
    unset: bool = False
    default: Any = None
    why: str = ""
    instead: Callable[[Any], tuple[Any, str] | None] = lambda value: None

    def take(self, value: Any) -> Any:
        """The value, converted by the first form that accepts it. Raises PlanError if none does."""
        if value is None and self.unset:
            return None
        for form in self.forms:
            try:
                return form.take(value)
            except (TypeError, ValueError):
                continue
        example = "" if self.example is None else f", as in {self.name}={self.example!r}"
        raise PlanError(f"{self.name} is {shown(value)}: {self._allowed(self.forms, value, example, by_text=False)}")

    def read(self, text: str) -> Any:
        """The value of a text from the command line. Raises PlanError if no form accepts it."""
        readable = [form for form in self.forms if form.read is not None]
        for form in readable:
            try:
                return form.take(form.read(text))  # type: ignore[misc]
            except (KeyError, TypeError, ValueError):
                continue
        example = "" if self.example is None else f", as in {self.flag} {as_text(self.example)}"
        raise PlanError(f"{text!r}: {self._allowed(readable, text, example, by_text=True)}")

    def _allowed(self, forms: Sequence[Form], value: Any, example: str, by_text: bool) -> str:
        """The end of an error: what may be written, and what was meant."""
        if meant := self.instead(value):
            hint = f"; did you mean {repr(meant[0]) if by_text else meant[1]}?"
        else:
            words = [word for form in forms for word in form.words()]
            hints = [did_you_mean(word, words) for word in _words_in(value) if word not in words]
            hint = next(filter(None, hints), "")
        return f"write {either([form.text for form in forms])}{example}{hint}"

    @property
    def flag(self) -> str:
        """The option's name on the command line: `--stages-per-device`."""
        return "--" + self.name.replace("_", "-")

    @property
    def values_text(self) -> str:
        """All forms of its value, as errors name them."""
        return either([form.text for form in self.forms])

    @property
    def default_text(self) -> str:
        """A sentence: the default, its reason and its cost, in the words of help, docstring and page."""
        value = f'"{self.default}"' if isinstance(self.default, str) else repr(self.default)
        return f"Default {value}: {self.why}."


def _words_in(value: Any) -> list[str]:
    """The texts of a value: itself, the items of a list, the values of a dict, also as the command line writes them.

    >>> _words_in("nevr"), _words_in({"loss": "maen", "mask": None}), _words_in("loss=maen")
    (['nevr'], ['maen'], ['maen'])
    """
    if isinstance(value, str):
        return [one.rpartition("=")[2].strip() for one in value.split(",")]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple, set)) else ()
    return [one for one in items if isinstance(one, str)]


def as_text(value: Any) -> str:
    """A value as the command line writes it.

    >>> as_text([3, 1]), as_text({"mask": None}), as_text("1f1b")
    ('3,1', 'mask=None', '1f1b')
    """
    if isinstance(value, Mapping):
        return ",".join(f"{name}={one}" for name, one in value.items())
    return ",".join(map(str, value)) if isinstance(value, (set, tuple, list)) else str(value)


def table(*options: Option) -> dict[str, Option]:
    """The options by name."""
    return {option.name: option for option in options}


def check(options: Mapping[str, Option], values: Mapping[str, Any]) -> None:
    """Raise PlanError if a value has none of its option's forms. Values that belong to no option are ignored."""
    for name in options.keys() & values.keys():
        options[name].take(values[name])


def shown(value: Any) -> str:
    """A value as an error shows it: its `repr`, or its type if the `repr` is long or says little.

    >>> shown("2"), shown([1, 2]), shown(object())
    ("'2'", '[1, 2]', 'of type object')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    plain = value is None or isinstance(value, (bool, int, float, str, tuple, list, set, frozenset, Mapping))
    text = repr(value) if plain else ""
    return text if plain and len(text) <= WIDTH and "\n" not in text else f"of type {type(value).__name__}"


def either(texts: Sequence[str]) -> str:
    """
    >>> either(["a", "b", "c"])
    'a, b, or c'
    """
    return ", or ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def words_text(words: Iterable[str]) -> str:
    """How an error names the words that a value may be."""
    return ", ".join(map(repr, words))


# Forms ----------------------------------------------------------------------------------------------------------------


def whole(least: int, text: str = "", most: int | None = None) -> Form:
    """Whole numbers of at least `least`, and at most `most` if given."""

    def take(value: Any) -> int:
        number = operator.index(value)
        if isinstance(value, bool) or number < least or (most is not None and number > most):
            raise ValueError
        return number

    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
    return Form(text or f"a whole number {bounds}", take, int)


def where(
    holds: Callable[[Any], bool],
    text: str,
    read: Callable[[str], Any] | None = None,
    words: Callable[[], Collection[str]] = tuple,
) -> Form:
    """Values for which `holds` returns True."""

    def take(value: Any) -> Any:
        if not holds(value):
            raise ValueError
        return value

    return Form(text, take, read, words)


def above_zero(text: str) -> Form:
    """Finite numbers above zero."""
    return where(lambda value: not isinstance(value, (bool, str)) and 0 < float(value) < math.inf, text, float)


def one_of(*words: str, more: Callable[[], Collection[str]] = tuple, text: str = "") -> Form:
    """These words, and those that `more()` returns when a value is checked."""

    def known() -> Collection[str]:
        return (*words, *more())

    return where(lambda value: isinstance(value, str) and value in known(), text or words_text(words), str, known)


def flag() -> Form:
    """True and False."""
    return instance((bool,), "True or False", lambda text: {"true": True, "false": False}[text.lower()])


def many(form: Form, text: str, kind: type[Any] = Sequence, make: Callable[[Any], Any] = tuple, least: int = 0) -> Form:
    """Collections of at least `least` values of one form; `kind` is the type of the collection, `make` converts it."""

    def take(value: Any) -> Any:
        if not isinstance(value, kind) or isinstance(value, (str, bytes, Mapping)):
            raise TypeError
        if len(value) < least:
            raise ValueError
        return make([form.take(one) for one in value])

    def read(value: str) -> list[Any]:
        if form.read is None:
            raise ValueError
        return [form.read(one.strip()) for one in value.split(",") if one.strip()]

    return Form(text, take, form.read and read, form.words)


def by_name(form: Form, text: str) -> Form:
    """Dicts from names to values of one form; on the command line, `name=value,name=value`."""

    def take(value: Any) -> Any:
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise TypeError
        return {name: form.take(one) for name, one in value.items()}

    def read(value: str) -> dict[str, Any]:
        pairs = [pair.rpartition("=") for pair in value.split(",")]
        if form.read is None or not all(name for name, _, _ in pairs):
            raise ValueError
        return {name.strip(): form.read(one.strip()) for name, _, one in pairs}

    return Form(text, take, form.read and read, form.words)


def or_none(form: Form, text: str) -> Form:
    """Values of the form, or None."""

    def read(value: str) -> Any:
        if form.read is None:
            raise ValueError
        return None if value.lower() == "none" else form.read(value)

    return Form(text, lambda value: None if value is None else form.take(value), form.read and read)


def or_word(word: str, form: Form, text: str) -> Form:
    """Values of the form, or this word."""

    def read(value: str) -> Any:
        return value if value == word or form.read is None else form.read(value)

    return Form(text, lambda value: word if value == word else form.take(value), read, lambda: (word,))


def or_instance(kind: type, form: Form) -> Form:
    """Values of the form, or instances of a class."""
    return Form(form.text, lambda value: value if isinstance(value, kind) else form.take(value), form.read, form.words)


def instance(kinds: tuple[type, ...], text: str, read: Callable[[str], Any] | None = None) -> Form:
    """Instances of one of these classes."""
    return where(lambda value: isinstance(value, kinds), text, read)


def path(text: str) -> Form:
    """Paths of files and folders."""
    return instance((str, os.PathLike), text, str)


def anything(text: str) -> Form:
    """Any value: others check it."""
    return where(lambda value: True, text)


def function(text: str) -> Form:
    """Callables that are not classes."""
    return where(lambda value: callable(value) and not isinstance(value, type), text)

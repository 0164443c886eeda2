"""Whether code may draw random numbers: it names a function that does."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from types import CodeType
from typing import Any

from torch import nn

from fxpipe.capture.twins.script_twin import ScriptTwin
from fxpipe.ir.graph.module_parts import used_modules

# Names of functions that may draw random numbers. Others are found if they draw in the runs of `learn_outputs.py`.
DRAWS = re.compile(
    r"rand(n|int|perm)?(_like)?|\w*dropout\w*|bernoulli_?|multinomial|normal_?|uniform_?|gumbel_softmax|r?sample"
    r"|exponential_|poisson|rrelu_?|\w*noise\w*"
)


def may_draw(module: nn.Module, uses: Collection[str] | None, called: CodeType | None) -> bool:
    """Whether code names a function that may draw random numbers: forward of the module, or what is `called` in its
    place, forward of the submodules that are used, and the methods that these name."""
    parts = [*([module] if called is None else []), *(part for _, part in used_modules(module, uses))]
    scripts = [part.script for part in parts if isinstance(part, ScriptTwin)]
    words = {word for script in scripts for word in re.findall(r"\w+", getattr(script, "code", ""))}
    methods: dict[str, set[CodeType]] = {}
    for part in parts:
        for kind in type(part).__mro__:
            if issubclass(kind, nn.Module) and kind is not nn.Module:
                for name, function in vars(kind).items():
                    if not (called and part is module and name == "forward"):
                        methods.setdefault(name, set()).update(_codes(function))
    waiting = [*([called] if called else []), *methods.pop("forward", ())]
    while waiting:
        words |= (new := names_in(waiting.pop()))
        waiting += [code for name in new for code in methods.pop(name, ())]
    return any(map(DRAWS.fullmatch, words))


def _codes(function: Any) -> Iterator[CodeType]:
    """The code of a method, or of a property, and of what its decorators wrap."""
    while function is not None:
        function = getattr(function, "fget", function)
        if isinstance(code := getattr(function, "__code__", None), CodeType):
            yield code
        function = getattr(function, "__wrapped__", None)


def names_in(code: CodeType) -> set[str]:
    """The names of globals and attributes in code, and its texts, which may be such names; also in that of functions
    inside of it."""
    texts = (text for text in code.co_consts if isinstance(text, str))
    inner = (names_in(part) for part in code.co_consts if isinstance(part, CodeType))
    return {*code.co_names, *texts}.union(*inner)

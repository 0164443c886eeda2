"""Whether code may draw random numbers: it names a function that does."""

from __future__ import annotations

import re
from collections.abc import Collection
from types import CodeType, FunctionType

from torch import nn

from fxpipe.capture.twins.script_twin import ScriptTwin
from fxpipe.ir.graph.module_parts import used_modules

# Names of functions that may draw random numbers. Others are found if they draw in the runs of `learn_outputs.py`.
DRAWS = re.compile(
    r"rand(n|int|perm)?(_like)?|\w*dropout\w*|bernoulli_?|multinomial|normal_?|uniform_?|gumbel_softmax|r?sample"
    r"|exponential_|poisson|rrelu_?|\w*noise\w*"
)


def may_draw(module: nn.Module, uses: Collection[str] | None, called: CodeType | None) -> bool:
    """Whether code names a function that may draw random numbers: that of the module, or of the function that is
    `called` in its place, and of submodules that are used."""
    parts = [*([module] if called is None else []), *(part for _, part in used_modules(module, uses))]
    scripts = [part.script for part in parts if isinstance(part, ScriptTwin)]
    words = {word for script in scripts for word in re.findall(r"\w+", getattr(script, "code", ""))}
    codes = [
        function.__code__
        for part in parts
        for kind in type(part).__mro__
        if issubclass(kind, nn.Module) and kind is not nn.Module
        for function in vars(kind).values()
        if isinstance(function, FunctionType) and not function.__name__.startswith(("__", "reset_", "extra_repr"))
    ]
    return any(map(DRAWS.fullmatch, words.union(*map(names_in, [*codes, *([called] if called else [])]))))


def names_in(code: CodeType) -> set[str]:
    """The names of globals and attributes in code, also in that of functions inside of it."""
    return {*code.co_names}.union(*(names_in(inner) for inner in code.co_consts if isinstance(inner, CodeType)))

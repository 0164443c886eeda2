"""The module that a person would have written for a random graph, as source text: for the way through Dynamo.

    def forward(self, x, *, y):
        b = x.shape[0]
        tanh_0 = torch.tanh(x)
        mul__1 = tanh_0.mul_(self.number_0)
        with torch.no_grad():
            exp_2 = torch.tanh(mul__1)
        return (exp_2, {"y": mul__1})

Numbers are attributes of the module, now and then, and all inputs but the first are keyword arguments, now and then.
"""

from __future__ import annotations

import importlib.util
import operator
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from fxpipe.ir.graph import Graph, Op, Ref
from tests.random_models import Draw, GraphModel

HEAD = """\
import operator

import torch
import torch.nn.functional as F

from tests.random_models import GraphModel


class Random(GraphModel):
"""


class Writer:
    """Writes the source of one graph. `numbers` are the values of the attributes it has put numbers into."""

    def __init__(self, graph: Graph, draw: Draw) -> None:
        self.graph, self.draw = graph, draw
        self.numbers: list[float] = []
        self.states = {state.name: state.path.split(".") for state in graph.states}

    def text(self, keywords: bool) -> str:
        first, *rest = (item.name for item in self.graph.inputs)
        arguments = [first, *(["*"] if keywords and rest else []), *rest]
        body = ["b = x.shape[0]", *(line for op in self.graph.ops for line in self.op(op))]
        body.append(f"return {self.code(self.graph.result)}")
        numbers = [f"    number_{index} = {number!r}" for index, number in enumerate(self.numbers)]
        head = [*numbers, "", f"    def forward(self, {', '.join(arguments)}):"]
        return HEAD + "\n".join([*head, *(f"        {line}" for line in body)]) + "\n"

    def op(self, op: Op) -> Iterator[str]:
        args = [self.code(arg) for arg in op.args]
        args += [f"{key}={self.code(value)}" for key, value in op.kwargs.items()]
        if op.target is operator.setitem:
            yield f"{args[0]}[{args[1]}] = {args[2]}"
            yield f"{op.name} = {args[0]}"
            return
        method = isinstance(op.target, str)
        call = f"{args[0]}.{op.target}({', '.join(args[1:])})" if method else f"{spell(op.target)}({', '.join(args)})"
        if op.regions:
            yield "with torch.no_grad():"
        yield ("    " if op.regions else "") + f"{op.name} = {call}"

    def code(self, nest: Any) -> str:
        if isinstance(nest, Ref):
            return self.state(nest.name) if nest.name in self.states else nest.name
        if isinstance(nest, (tuple, list)):
            inner = ", ".join(map(self.code, nest))
            return f"[{inner}]" if isinstance(nest, list) else f"({inner},)"
        if isinstance(nest, dict):
            return "{" + ", ".join(f"{key!r}: {self.code(value)}" for key, value in nest.items()) + "}"
        if isinstance(nest, float) and self.draw((False, True)):
            self.numbers.append(nest)
            return f"self.number_{len(self.numbers) - 1}"
        return repr(nest)

    def state(self, name: str) -> str:
        layers, index, leaf = self.states[name]
        return f"getattr(self.{layers}, {index!r}).{leaf}"


def spell(target: Any) -> str:
    """How one writes a function of torch."""
    for prefix, module in (("operator", operator), ("F", F), ("torch", torch)):
        if getattr(module, target.__name__, None) is target:
            return f"{prefix}.{target.__name__}"
    raise ValueError(f"{target} has no public name")


def load(text: str, folder: Path) -> type[GraphModel]:
    """The class, from a file, so that lines can be looked up."""
    path = folder / "random_model.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"random_model_{folder.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dynamo looks its globals up there
    spec.loader.exec_module(module)
    found: type[GraphModel] = module.Random
    return found

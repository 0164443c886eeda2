"""Stages that run through torch.compile.

    package.STAGES ──cut──▶ pieces ──torch.compile──▶ package.STAGES, compiled

A compiled piece is one node of autograd, so its backward is compiled too, and is not split: a schedule that splits
backward has all of it in the first half. Where backward is code, its methods are cut and compiled as forward is, and
stay split. Nothing else changes for schedulers. A piece is compiled at the first
micro-batch of each kind, on the worker that runs it; what Inductor has made is then called directly
(`direct_calls.py`). Only one piece is compiled at a time, and never while another
thread draws random numbers, because compilation resets torch's generators to their state before it.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from fxpipe.codegen.stage.compile_regions import cut
from fxpipe.codegen.text.op_text import EmitError
from fxpipe.errors import CompileError
from fxpipe.runtime import Stage
from fxpipe.runtime.error_notes import user_line
from fxpipe.runtime.random import nobody_draws
from fxpipe.torch_internals.compiling.stage_compiler import compiled_stage, copy_context

from .direct_calls import ANOTHER, MOST_KINDS, inductor, known_call, recorded

Backend = str | Callable[..., Any]

METHODS = ("forward", "backward", "input_gradient", "weight_gradient")
OWN_CONTEXT = "fxpipe: has a context of its own"  # in the metadata of nodes


def compile_stages(package: ModuleType, backend: Backend) -> None:
    """Let the stages of an imported package run through torch.compile with this backend. They are compiled when they
    first run. Raises CompileError if a stage that was edited cannot be cut."""
    package.STAGES = tuple(compiled(kind, backend) for kind in package.STAGES)  # type: ignore[attr-defined]


def compiled(kind: type[Stage], backend: Backend) -> type[Stage]:
    """A subclass of the stage whose methods are compiled. Raises CompileError if one cannot be cut."""
    file = inspect.getfile(kind)
    tree = ast.parse(Path(file).read_text(encoding="utf-8"), file)
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
    methods = [node for node in next(classes).body if isinstance(node, ast.FunctionDef) and node.name in METHODS]
    known = kind.forward.__globals__
    eager = {name for name, value in known.items() if getattr(value, "__module__", "").startswith("fxpipe.runtime.")}
    own: dict[str, Any] = {"compiled": True, "__module__": kind.__module__}
    for method in methods:
        try:
            *pieces, outer = cut(method, (*kind.states, *kind.constants, ".device"), eager | {*kind.opaque})
        except EmitError as error:
            raise CompileError(f"{kind.__name__} cannot be compiled: {error}") from None
        # Dynamo keeps the globals of the code that it compiles alive. So a method, which holds pieces, has its own.
        made = define(pieces, file, dict(known))
        compiled_pieces = {piece.name: Piece(kind, made[piece.name], backend) for piece in pieces}
        own[method.name] = define([outer], file, known | compiled_pieces)[method.name]
    return type(kind.__name__, (kind,), own)


def define(functions: list[ast.FunctionDef], file: str, known: dict[str, Any]) -> dict[str, Any]:
    """Define the functions with `known` as their globals; returns the globals."""
    tree = ast.Module([*functions], [])
    exec(compile(tree, file, "exec"), known)
    return known


def name_of(backend: Backend) -> str:
    """The backend's name for messages."""
    return backend if isinstance(backend, str) else getattr(backend, "__name__", type(backend).__name__)


class Piece:
    """A part of a method of a stage, compiled when it is first called."""

    def __init__(self, kind: type[Stage], eager: FunctionType, backend: Backend) -> None:
        self.kind, self.eager, self.backend = kind, eager, backend
        self.known: tuple[Callable[..., Any], ...] = ()  # kinds of calls
        self.run = compiled_stage(self, eager, inductor if backend == "inductor" else backend, nobody_draws)

    def __call__(self, *args: Any) -> Any:
        try:
            for call in self.known:
                made = call(*args)
                if made is not ANOTHER:
                    return made
            made, runs = recorded(self.run, args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            failure = error
        else:
            _with_own_contexts(made)
            known = known_call(args, made, runs)
            if known is not None:
                self.known = (known, *self.known[: MOST_KINDS - 1])
            return made
        # An error of the model itself is raised again here, with its line. On copies, because forward may write.
        self.eager(*[arg.clone() if isinstance(arg, Tensor) else arg for arg in args])
        try:
            raise self.refusal(failure)
        finally:
            del failure, args  # otherwise error and frame form a reference cycle

    def refusal(self, error: Exception) -> CompileError:
        """The CompileError for an error of the compiler, or of the code that it made."""
        inner = getattr(error, "inner_exception", error)
        frames = [frame for frame in getattr(error, "real_stack", None) or () if frame.filename == self.file]
        line = user_line(self.kind, frames[-1].lineno or 0) if frames else None
        place = f" at {line}" if line else ""
        reason = str(inner).strip().partition("\n")[0]
        what = f"{self.kind.__name__} cannot be compiled by {name_of(self.backend)}{place}"
        made = CompileError(f"{what}: {type(inner).__name__}: {reason}; without compile_stages it runs")
        made.__cause__ = error
        return made

    @property
    def file(self) -> str:
        code: CodeType = self.eager.__code__
        return code.co_filename


def _with_own_contexts(made: Any) -> None:
    """Let compiled backwards of several devices run at the same time. Up to PyTorch 2.13 all of one call of `backward`
    enter the same `contextvars.Context`, which one thread can do at a time, and each device has a thread; so each
    node gets a copy of it."""
    for value in made if isinstance(made, tuple) else (made,):
        if isinstance(value, Tensor) and value.device.type != "cpu" and value.grad_fn is not None:
            node: Any = value.grad_fn
            nodes = [node, *(before for before, _ in node.next_functions)]  # a view is made of what the node gave
            compiled_node = next((one for one in nodes if one is not None and "Compiled" in one.name()), None)
            if compiled_node is not None and OWN_CONTEXT not in compiled_node.metadata:
                compiled_node.metadata[OWN_CONTEXT] = compiled_node.register_prehook(copy_context)

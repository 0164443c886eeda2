"""Loss functions that cannot be traced, and whose code shows that they are a mean or a sum over samples.

    def loss_fn(out, target):
        terms = []
        for o, t in zip(out, target):                    the arguments are gone through together, sample by sample
            order = match(o.detach().numpy(), t)         anything that is made of one sample alone
            terms.append(F.mse_loss(o[order], t))        one term a sample
        return torch.stack(terms).mean()                 their mean

Called for one sample, such a function returns the term of that sample. So it is called for each, and the mean or sum is
an op of the graph, from which the loss of the whole batch is known. What functions that it calls remember from sample
to sample is not looked at.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from fxpipe.capture.tracing.size_names import source_tree
from fxpipe.errors import InputError, of_user

BARRED = (ast.Lambda, ast.NamedExpr, ast.Yield, ast.YieldFrom, ast.Await)  # what may run later, or assigns names


def how_reduced(loss_fn: Any) -> str | None:
    """What a loss function makes of the terms of single samples: "mean" or "sum"; None if its code does not show it."""
    if not isinstance(loss_fn, FunctionType) or loss_fn.__globals__.get("torch", torch) is not torch:
        return None
    own = {*loss_fn.__globals__, *loss_fn.__code__.co_freevars}
    return None if own & {"zip", "len", "sum"} else _how_reduced(loss_fn.__code__)


def by_sample(loss_fn: Any, given: tuple[Any, ...]) -> Tensor | None:
    """The losses of single samples, f[b]; None if the arguments are not all tensors or lists with as many samples.
    Raises InputError if the loss is no single number."""
    samples = [_samples(x) for x in given]
    if len(set(map(len, samples))) != 1 or not samples[0]:
        return None
    each = [loss_fn(*one) for one in zip(*samples, strict=True)]
    if not all(isinstance(loss, Tensor) and not loss.dim() for loss in each):
        raise InputError(f"{of_user(loss_fn)} returns {each[0]!r}, which is no loss; return a tensor with one number")
    return torch.stack(each)


def _samples(given: Any) -> Sequence[Any]:
    """A tensor or list of each sample alone; nothing for others."""
    if isinstance(given, Tensor):
        return torch.split(given, 1) if given.dim() else ()
    return [[item] for item in given] if type(given) is list else ()


@lru_cache(maxsize=256)
def _how_reduced(code: CodeType) -> str | None:
    names = code.co_varnames[: code.co_argcount]
    if code.co_kwonlyargcount or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS) or not names:
        return None
    tree = source_tree(code)
    function = tree.body[0] if tree is not None and len(tree.body) == 1 else None
    if not isinstance(function, ast.FunctionDef):
        return None
    body = [statement for statement in function.body if not _is_text(statement)]
    if not body or not isinstance(last := body[-1], ast.Return) or last.value is None:
        return None
    if len(body) == 1:
        return _of_generator(last.value, names)
    *starts, loop = body[:-1]
    if not isinstance(loop, ast.For) or loop.orelse or not _goes_through(loop.iter, names):
        return None
    found = _reduced(last.value, names)
    into = None if found is None else _name(found[0])
    if found is None or into is None or len(starts) != 1 or _start(starts[0]) != (into, found[1]):
        return None
    terms = [_term(statement, into) for statement in loop.body]
    others = [statement for statement, term in zip(loop.body, terms, strict=True) if term is None]
    once = len(others) == len(terms) - 1 and all(map(_only_names, others))
    body = [term or statement for statement, term in zip(loop.body, terms, strict=True)]
    return found[2] if once and _alone(body, _stored(loop.target), {*names, into}) else None


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _goes_through(iterated: ast.expr, names: tuple[str, ...]) -> bool:
    """Whether this is all arguments together, sample by sample: `zip(out, target)`, or the only one."""
    if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name) and iterated.func.id == "zip":
        strict = all(keyword.arg == "strict" for keyword in iterated.keywords)
        return strict and [_name(arg) for arg in iterated.args] == [*names]
    return (_name(iterated),) == names


def _name(node: Any) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def _start(statement: ast.stmt) -> tuple[str | None, str] | None:
    """What `terms = []` or `total = 0` begins: the name, and whether it is a list or a number; None for others."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    name, value = _name(statement.targets[0]), statement.value
    if isinstance(value, ast.List) and not value.elts:
        return name, "list"
    zero = isinstance(value, ast.Constant) and type(value.value) in (int, float) and value.value == 0
    return (name, "number") if zero else None


def _term(statement: ast.stmt, of: str) -> ast.stmt | None:
    """The statement with the term of a sample, if this adds it to the list or number; else None."""
    term: ast.expr | None = None
    if isinstance(statement, ast.Expr) and isinstance(call := statement.value, ast.Call):
        is_append = isinstance(call.func, ast.Attribute) and call.func.attr == "append" and _name(call.func.value) == of
        term = call.args[0] if is_append and len(call.args) == 1 and not call.keywords else None
    elif isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add) and _name(statement.target) == of:
        term = statement.value
    elif isinstance(statement, ast.Assign) and [_name(target) for target in statement.targets] == [of]:
        value: ast.expr = statement.value
        parts = list[ast.expr]()
        while isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
            parts.append(value.right)
            value = value.left
        term = ast.Tuple(parts) if parts and _name(value) == of else None
    return None if term is None else ast.Expr(term)


def _reduced(value: ast.expr, names: tuple[str, ...]) -> tuple[ast.expr, str, str] | None:
    """What is reduced, whether it is a list or a number, and how; None if that is not known."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div):
        found = _reduced(value.left, names)
        counted = _name(_given_to("len", value.right))
        if found is None or found[2] != "sum" or counted is None or counted not in (*names, _name(found[0])):
            return None
        return *found[:2], "mean"
    if isinstance(value, ast.Name):
        return value, "number", "sum"
    if not isinstance(value, ast.Call) or value.keywords:
        return None
    if (added := _given_to("sum", value)) is not None:
        return added, "list", "sum"
    stacked = value.func.value if isinstance(value.func, ast.Attribute) and not value.args else None
    how = value.func.attr if isinstance(value.func, ast.Attribute) else ""
    if how in ("mean", "sum") and isinstance(stacked, ast.Call) and ast.unparse(stacked.func) == "torch.stack":
        return (stacked.args[0], "list", how) if len(stacked.args) == 1 and not stacked.keywords else None
    return None


def _given_to(function: str, value: ast.expr) -> ast.expr | None:
    """The argument of a call of this function of Python with one; None for others."""
    calls = isinstance(value, ast.Call) and _name(value.func) == function and not value.keywords
    return value.args[0] if calls and isinstance(value, ast.Call) and len(value.args) == 1 else None


def _of_generator(value: ast.expr, names: tuple[str, ...]) -> str | None:
    """How `torch.stack([term(o, t) for o, t in zip(out, target)]).mean()` is reduced."""
    found = _reduced(value, names)
    if found is None or not isinstance(found[0], (ast.ListComp, ast.GeneratorExp)) or len(found[0].generators) != 1:
        return None
    one = found[0].generators[0]
    plain = not one.ifs and not one.is_async and _goes_through(one.iter, names)
    fine = plain and _alone([ast.Expr(found[0].elt)], _stored(one.target), {*names})
    return found[2] if fine else None


def _stored(node: ast.AST) -> set[str]:
    """The names that are assigned in it."""
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}


def _alone(statements: Sequence[ast.stmt], known: set[str], outside: set[str]) -> bool:
    """Whether statements only use names that are `known`, that they assign before, or that nothing in the function
    assigns; so that nothing comes from the samples before, and none of `outside`."""
    local = known.union(outside, *map(_stored, statements))
    for statement in statements:
        nodes = list(ast.walk(statement))
        own = {name for one in nodes if isinstance(one, ast.comprehension) for name in _stored(one.target)}
        loads = {one.id for one in nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
        barred = any(isinstance(one, BARRED) for one in nodes) or own & known or _stored(statement) & outside
        if barred or (loads - own) & (local - known):
            return False
        known = known | (_stored(statement) - own)
    return True


def _only_names(statement: ast.stmt) -> bool:
    """Whether it only computes something, and gives it a name."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = [name for target in targets for name in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return bool(names) and all(isinstance(name, ast.Name) for name in names)

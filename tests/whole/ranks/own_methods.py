"""What ranks do in test_own_methods.py: each public method of a library's model, called through a pipe.

plain    a copy, the method: a result or an error, and a state
pipe     the method, on every rank: the same result, error and state, or a refusal that names the method
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from inspect import getattr_static
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxpipe
from fxpipe import FxpipeError
from tests.whole.ranks.library_tables import INPUTS, MADE, REFUSED, SHARES, UNTRIED, table_of
from tests.whole.ranks.method_tables import Call, Given

METHOD_TYPES = (FunctionType, MethodType, partial, classmethod, staticmethod)
NEVER = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager", "push_to_hub")
NEVER = (*NEVER, "to_onnx", "to_tensorrt")  # of packages that are not there
ADDRESS = re.compile(r"0x[0-9a-f]+")


def public_methods(model: nn.Module) -> list[str]:
    """The names of all public methods of the model."""
    names = [name for name in dir(model) if not name.startswith("_")]
    return [name for name in names if isinstance(getattr_static(model, name, None), METHOD_TYPES)]


def unknown(name: str) -> tuple[list[str], list[str]]:
    """The methods of this model that no table has, and the entries of tables that are no methods."""
    methods, called = {*public_methods(MADE[name]())}, {*table_of(name)} | {*REFUSED[name]}
    return sorted(methods - called - {*UNTRIED[name]}), sorted(called - methods)


class Pair:
    """A pipe over ranks and the plain model with the same values, which are not those that the pipe was made of."""

    def __init__(self, group: Any, name: str, start: nn.Module, gathered: bool = False) -> None:
        self.plain, self.name, self.refused = start, name, {} if gathered else REFUSED[name]
        self.pipe = fxpipe.compile(copy.deepcopy(start), chunks=2, group=group, timeout=120)
        self.pipe.prepare(**INPUTS[name]())
        held = dict(self.pipe.named_parameters())
        with torch.no_grad():
            for key, parameter in self.plain.named_parameters():
                for one in (parameter, held.get(key)):
                    if one is not None:
                        one.mul_(0.9)

    @property
    def state(self) -> dict[str, Any]:
        return {key: x.clone() for key, x in self.plain.state_dict().items()}

    def outputs(self, run: Any) -> Any:
        with torch.no_grad():
            found = run(**INPUTS[self.name]())
        return found[0] if isinstance(found, tuple) else next(iter(found.values())) if hasattr(found, "keys") else found

    def check_outputs(self, plain: nn.Module | None = None) -> None:
        torch.testing.assert_close(self.outputs(self.pipe), self.outputs(plain or self.plain))


def each_method(group: Any, name: str, folder: Path) -> list[str]:
    """Call each method of the table, and once more those that are refused, with the whole model in each process.
    Returns the names of those that are refused; fails with all that is wrong."""
    warnings.simplefilter("ignore")
    table = {**table_of(name), **REFUSED[name]}
    refused, wrong = called(group, name, folder, table)
    again = {method: table[method] for method in refused if method not in NEVER}
    still, more = called(group, name, folder / "whole", again, gathered=True)
    assert not wrong + more, "\n".join(wrong + more)
    assert not still, f"refused after gather(): {still}"
    return refused


def called(
    group: Any, name: str, folder: Path, table: Mapping[str, Call], gathered: bool = False
) -> tuple[list[str], list[str]]:
    """The names of the methods that some rank refuses, and what is wrong on this one."""
    start = MADE[name]().eval()
    if hasattr(start, "save_pretrained"):  # which also changes the model's config
        start.save_pretrained(folder / ("saved" if dist.get_rank(group) == 0 else "unread"))
    pair, refused, wrong = Pair(group, name, copy.deepcopy(start), gathered), set(), []
    for method, call in table.items():
        trial = copy.deepcopy(pair.plain)
        if gathered:
            pair.pipe.gather()
        try:
            refuses = tried(pair, trial, method, call, folder / f"rank-{pair.pipe.place}")
            problem = ""
        except Exception as error:  # all that is wrong is told at once
            refuses, problem = False, f"{method}: {type(error).__name__}: {error}"
        every = pair.pipe.collect((problem, refuses, structure(trial) != structure(pair.plain)))
        failed, refusing, changed = (any(found) for found in zip(*every, strict=True))
        refused |= {method} if refusing else set()
        partly = refusing and not all(one for _, one, _ in every)
        if changed and partly:
            problem = f"{method}: refused on some ranks, and the others have changed: {every}"
        elif changed and not refusing and not failed:
            try:
                pair.check_outputs(trial)
            except Exception as error:
                problem = f"{method}, and then a call: {type(error).__name__}: {error}"
        wrong += [problem] if problem else []
        if failed or (changed and (partly or not refusing)):
            pair.pipe.close()
            pair = Pair(group, name, copy.deepcopy(start), gathered)
        elif not refuses:
            pair.plain = trial
    pair.check_outputs()
    pair.pipe.close()
    return sorted(refused), wrong


def tried(pair: Pair, trial: Any, method: str, call: Call, folder: Path) -> bool:
    """Call the method on a copy of the plain model, and on the pipe. Returns whether the pipe refuses it."""
    torch.manual_seed(3)
    given = Given(folder / "plain" / method, folder.parent / "saved", pair.state)
    wanted = None if method in pair.refused else outcome(call, trial, given)
    torch.manual_seed(3)
    found = outcome(call, pair.pipe, given._replace(folder=folder / "pipe" / method))
    if isinstance(found, FxpipeError):
        assert method in str(found), f"the error does not name the method: {found}"
        same_state(pair.pipe, pair.plain)
        return True
    assert method not in pair.refused, f"not refused: {found}"
    same(found, wanted, pair.pipe, trial, share=method in SHARES)
    same_state(pair.pipe, trial)
    return False


def outcome(call: Callable[..., Any], run: Any, given: Given) -> Any:
    """What a call returns, or the error that it raises."""
    given.folder.mkdir(parents=True, exist_ok=True)
    try:
        found = call(run, given)
        return list(found) if isinstance(found, Iterator) else found
    except Exception as error:
        return error


def same(found: Any, wanted: Any, pipe: Any, plain: Any, share: bool = False) -> None:
    """Whether the result is that of the plain model; `share`: the shares of all ranks together."""
    if share:
        keys = [key for some in pipe.collect([key for key, _ in pairs(found)]) for key in some]
        assert {*keys} == {key for key, _ in pairs(wanted)}
        wanted = {key: value for key, value in pairs(wanted) if key in dict(pairs(found))}
        found = dict(pairs(found))
    if wanted is plain:
        assert found is pipe, "returns not the pipe"
    elif isinstance(wanted, Exception):
        assert type(found) is type(wanted), f"{found!r}, and the plain model raises {wanted!r}"
        assert plainly(found).replace("RankPipe", type(plain).__name__) == plainly(wanted)
    elif isinstance(found, Exception):
        raise AssertionError(f"raises {found!r}, and the plain model returns {wanted!r}")
    elif isinstance(wanted, Tensor):
        assert found.shape == wanted.shape
        if type(found).__name__ not in ("Released", "ReleasedParameter"):  # these refuse to be read
            torch.testing.assert_close(found, wanted)
    elif isinstance(wanted, nn.Module):
        assert plainly(found) == plainly(wanted)
        for one, other in zip(found.parameters(), wanted.parameters(), strict=True):
            same(one, other, pipe, plain)
    elif isinstance(wanted, Mapping):
        assert [*found] == [*wanted]
        for key in wanted:
            same(found[key], wanted[key], pipe, plain)
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), (found, wanted)
        for one, other in zip(found, wanted, strict=True):
            same(one, other, pipe, plain)
    else:
        assert plainly(found) == plainly(wanted)


def pairs(found: Any) -> Iterable[tuple[str, Any]]:
    return found.items() if isinstance(found, Mapping) else found


def plainly(value: Any) -> str:
    """As text, without addresses and folders."""
    return re.sub(r"/(pipe|plain)/", "/", ADDRESS.sub("", f"{type(value).__name__} {value}"))


def structure(model: Any) -> Any:
    """What the state of a model does not have."""
    config = getattr(model, "config", None)
    config = config.to_dict() if hasattr(config, "to_dict") else config
    return plainly(model), config, [(key, x.dtype) for key, x in model.state_dict().items()]


def same_state(pipe: Any, plain: nn.Module) -> None:
    """Whether the pipe's tensors on this rank, modes and modules are those of the plain model."""
    assert plainly(pipe.model) == plainly(plain)
    assert [m.training for m in pipe.model.modules()] == [m.training for m in plain.modules()]
    wanted = plain.state_dict(keep_vars=True)
    for key, value in pipe.state_dict(keep_vars=True).items():
        torch.testing.assert_close(value.detach(), wanted[key].detach(), msg=key)
    for (key, one), (_, other) in zip(pipe.model.named_parameters(), plain.named_parameters(), strict=True):
        assert one.requires_grad == other.requires_grad, key
        assert one.dtype == other.dtype, key

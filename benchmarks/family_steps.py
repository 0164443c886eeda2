"""A step of a small transformer by itself and as a pipe, and whether both have the same loss and gradients."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass
from itertools import product
from math import prod
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxpipe
from benchmarks.models.small_batches import Batch, batches, counted, floats, labelled, square
from benchmarks.models.small_transformers import build, configs, seeded
from fxpipe.ir.program.program import Stage

RESULTS = "right", "mixes", "wrong", "refused", "error", "hang", "plain fails"
RIGHT, MIXES, WRONG, REFUSED, ERROR, HANG, PLAIN = RESULTS
GOLDEN = 5**0.5 / 2 - 0.5  # multiples of it are spread evenly, without their whole parts
DOUBLE, SINGLE = (1e-7, 1e-9), (1e-4, 1e-6)  # relative and absolute; the latter, times the largest gradient


@dataclass(frozen=True)
class Family:
    """A class of a task, of a type of model."""

    task: str
    kind: str
    name: str


@dataclass(frozen=True)
class Found:
    """What came of a family in so many micro-batches; 0 is the plain model's own step.

    - `stages`: of the pipe, if there is one; `autograd`: why stages have no generated backward, for each of these.
    - `apart`: the largest difference of a gradient or of the loss, by the largest value there is.
    - `notes`: what the comparison was like, and what fxpipe warned of.
    """

    task: str
    kind: str
    name: str
    chunks: int
    result: str
    reason: str = ""
    stages: int | None = None
    autograd: Sequence[str] = ()
    seconds: float = 0.0
    apart: float | None = None
    notes: str = ""


def serve(connection: Connection, counts: Sequence[int]) -> None:
    """Answer each family with the plain model's result, then with that of each number of micro-batches."""
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    with suppress(EOFError, BrokenPipeError):  # until nobody asks any more
        while True:
            family, done = connection.recv()
            for found in results(family, [one for one in counts if one not in done]):
                connection.send(found)
            connection.send(None)  # that is all
            gc.collect()


def results(family: Family, counts: Sequence[int]) -> Iterator[Found]:
    start = perf_counter()
    own = asdict(family)
    try:
        plain = Plain.of(family)
    except Exception as error:
        yield Found(**own, chunks=0, result=PLAIN, reason=first_line(error), seconds=perf_counter() - start)
        return
    yield Found(**own, chunks=0, result=RIGHT, seconds=perf_counter() - start, notes=plain.notes)
    for chunks in counts:
        if plain.random and chunks > 1:
            continue  # each micro-batch draws its own numbers
        start = perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result, reason, built, apart = plain.compared(chunks)
        said = [first_line(one.message) for one in caught if one.category.__module__.startswith("fxpipe")]
        if result == WRONG and any(one.category is fxpipe.MixedSamplesWarning for one in caught):
            result = MIXES
        notes = "; ".join([*([plain.notes] if plain.notes else []), *dict.fromkeys(said)])
        seconds = perf_counter() - start
        autograd = [stage.autograd_because for stage in built or () if stage.autograd_because]
        yield Found(**own, chunks=chunks, result=result, reason=reason, stages=built and len(built), autograd=autograd,
                    seconds=seconds, apart=apart, notes=notes)  # fmt: skip


@dataclass
class Plain:
    """A model that trains, with its batch, its loss and its gradients."""

    model: nn.Module
    batch: Batch
    loss: Tensor
    gradients: dict[str, Tensor]
    single: bool
    random: bool
    notes: str

    @classmethod
    def of(cls, family: Family) -> Plain:
        """The first config and batch with which the model trains. Raises what the first of them raised if none does."""
        import transformers

        model_class = getattr(transformers, family.name)
        failed: dict[str, Exception] = {}
        tries = product((True, False), configs(family.kind, family.task), (torch.float64, torch.float32))
        for with_labels, make, dtype in tries:
            try:
                config = make()
                model = build(model_class, config, dtype)
            except Exception as error:
                failed[first_line(error)] = error
                continue
            for batch in batches(family.task, model, config):
                if labelled(batch) != with_labels:
                    continue
                for training, same in ((True, False), (False, False), (False, True)):
                    try:
                        if (found := cls.trained(model, floats(batch, dtype), training, same)) is not None:
                            return found
                    except Exception as error:
                        failed[first_line(error)] = error
                        break
        said = [f"{type(error).__name__}: {line[:200]}" for line, error in failed.items()]
        raise RuntimeError(" | ".join(said) or "no batch of this task fits the arguments of its forward")

    @classmethod
    def trained(cls, model: nn.Module, batch: Batch, training: bool, same: bool) -> Plain | None:
        """None if the gradients depend on random numbers, and are not asked for with the `same` ones."""
        runs = []
        for seed in (1, 1 if same else 2):
            own = deepcopy(model)
            if not training:
                own.eval()
            start = deepcopy(own)
            seeded(seed)
            with Precision() as precision, unchanging(same):
                loss = loss_of(own, batch)
                loss.backward()  # type: ignore[no-untyped-call]
            runs.append((loss.detach(), gradients_of(own)))
        (loss, gradients), again = runs
        if not loss.isfinite() or not gradients or not all(one.isfinite().all() for one in gradients.values()):
            raise ValueError("the loss or a gradient is not finite, or there is none")
        if max(apart(loss, again[0]), *(apart(one, again[1].get(name)) for name, one in gradients.items())) > 0:
            return None
        notes = {"eval": not training, "random": same, "single": precision.single,
                 "loss of outputs": not labelled(batch)}  # fmt: skip
        said = ", ".join(name for name, is_so in notes.items() if is_so)
        return cls(start, batch, loss, gradients, precision.single, same, said)

    def compared(self, chunks: int) -> tuple[str, str, tuple[Stage, ...] | None, float | None]:
        """The result, its reason, the stages, and how far apart the gradients are."""
        pipe = stages = None
        model = deepcopy(self.model)
        try:
            pipe = fxpipe.compile(model, devices=2, chunks=chunks, batch_dim=counted(self.batch))
            seeded(1)
            with unchanging(self.random):
                loss = pipe.step(**self.batch, loss_fn=None if labelled(self.batch) else square)
            stages = pipe.build.program.stages
        except fxpipe.FxpipeError as error:
            return REFUSED, f"{type(error).__name__}: {first_line(error)}", stages, None
        except Exception as error:
            return ERROR, f"{type(error).__name__}: {first_line(error)}", stages, None
        finally:
            if pipe is not None:
                pipe.close()
        return self.judged(loss, gradients_of(model), stages)

    def judged(
        self, loss: Tensor, gradients: dict[str, Tensor], stages: tuple[Stage, ...]
    ) -> tuple[str, str, tuple[Stage, ...], float]:
        largest = max(apart(one, None) for one in self.gradients.values())
        relative, absolute = SINGLE if self.single else DOUBLE
        absolute = absolute * largest if self.single else absolute
        wrong = []
        for name in sorted(self.gradients.keys() | gradients.keys()):
            want, got = self.gradients.get(name), gradients.get(name)
            want = torch.zeros_like(got) if want is None and got is not None else want
            got = torch.zeros_like(want) if got is None and want is not None else got
            if want is not None and got is not None and not torch.allclose(got, want, relative, absolute):
                wrong.append(name)
        worst = max(apart(one, gradients.get(name)) for name, one in self.gradients.items()) / (largest or 1.0)
        if not torch.allclose(loss.double(), self.loss.double(), relative, absolute):
            return WRONG, f"loss {loss.item():.9g} of {self.loss.item():.9g}", stages, worst
        if wrong:
            return WRONG, f"{len(wrong)} of {len(self.gradients)} gradients, as of {wrong[0]}", stages, worst
        return RIGHT, "", stages, worst


def unchanging(wanted: bool) -> AbstractContextManager[Any]:
    """If wanted, a context in which `torch.rand` has the same numbers in every call of a shape, as a pipe draws others
    than the plain model."""
    return patch.object(torch, "rand", _spread_evenly) if wanted else nullcontext()


def _spread_evenly(*size: Any, device: Any = None, dtype: Any = None) -> Tensor:
    shape = size if all(isinstance(one, int) for one in size) else tuple(*size)
    numbers = torch.arange(prod(shape), device=device, dtype=dtype or torch.get_default_dtype())
    return (numbers * GOLDEN).frac().reshape(shape)


class Precision(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Whether any operator returned floats that are not doubles."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.single = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, (list, tuple)) else (found,):
            if isinstance(one, Tensor) and one.is_floating_point() and one.dtype != torch.float64 and one.numel() > 1:
                self.single = True
        return found


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    output = model(**batch)
    if not labelled(batch):
        return square(output)
    loss = output.get("loss") if isinstance(output, dict) else output[0]
    if loss is None or loss.dim():
        raise ValueError("the model returns no loss")
    return loss  # type: ignore[no-any-return]


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def apart(a: Tensor, b: Tensor | None) -> float:
    """The largest difference; from zero, without `b`."""
    return float((a if b is None else a - b).abs().max()) if a.numel() else 0.0


def first_line(error: object) -> str:
    """The first line of what an error says; with the two after it if it says nothing by itself.

    >>> first_line("sizes differ\\nin b.py"), first_line("no size:\\n  a"), first_line(KeyError())
    ('sizes differ', 'no size: a', 'KeyError')
    """
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()] or [type(error).__name__]
    alone = " " in lines[0] and not lines[0].endswith(":")
    return " ".join(lines[: 1 if alone else 3])[:1000]

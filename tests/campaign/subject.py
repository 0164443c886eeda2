"""A random model that has been loaded, and what the plain model gives for each kind of run."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.ir.graph.opaque_call import Opaque, opaques
from fxpipe.pipe.ranks.released_tensors import Released
from fxpipe.runtime.microbatch import split_sizes
from fxpipe.runtime.random import new_seed
from tests.helpers.transparency import Result, Seeded, deferred_batch_norm, differences, own_buffers

from .nests import cast, cut, join, tensors, together, unpacked
from .setting import Run, Setting

TOLERANCE, HALF_TOLERANCE = 1e-9, 5e-2
# What tolerances are relative to, at least: what sums of numbers near 1 that cancel leave of float64 and bfloat16.
FLOOR, HALF_FLOOR = 1e-4, 0.1


def load(path: Path) -> ModuleType:
    """The module of a file: its lines can be looked up, and Dynamo finds its globals."""
    name = f"campaign_{path.stem}_{abs(hash(str(path)))}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class PartlyWhole(Exception):
    """What samples share is that of the whole batch for some, of the micro-batch or a slice of it for others: no plain
    run does the same."""


@dataclass
class Subject:
    """The plain model and its twin, which the pipes run, in float64, or in float32 for autocast."""

    module: ModuleType
    half: bool = False
    model: nn.Module = field(init=False)
    twin: nn.Module = field(init=False)
    known: dict[Any, Result] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model, self.twin = self.made(), self.made()
        self.buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def made(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            model: nn.Module = self.module.Random()
            return model.to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.half else torch.float64

    @property
    def tolerance(self) -> float:
        return HALF_TOLERANCE if self.half else TOLERANCE

    @property
    def floor(self) -> float:
        return HALF_FLOOR if self.half else FLOOR

    def precision(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16) if self.half else nullcontext()

    def inputs(self, batch: int) -> tuple[Any, Any, Any]:
        """Arguments, keyword arguments and the target of the loss, the same at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(batch)
            args, kwargs = self.module.make_inputs(batch)
            return cast(args, self.dtype), cast(kwargs, self.dtype), cast(self.module.make_target(batch), self.dtype)

    def loss(self, output: Any, target: Any) -> Tensor:
        loss_fn = self.module.loss_fn
        found: Tensor = (
            output.loss if loss_fn is None else loss_fn(output) if target is None else loss_fn(output, target)
        )
        return found

    def ready(self, model: nn.Module, training: bool) -> None:
        """The model as it was at first: no gradients, its own buffers."""
        model.train(training).zero_grad()
        owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in self.buffers}
        for name, buffer in self.buffers.items():
            now = getattr(owners[name], name.rpartition(".")[2])
            if isinstance(now, Released):  # which another rank has
                continue
            if now.shape == buffer.shape:
                with torch.no_grad():
                    now.copy_(buffer)
            else:
                setattr(owners[name], name.rpartition(".")[2], buffer.clone())

    def run(self, run: Run, call: Callable[..., Any]) -> Result:
        """What `call(args, kwargs, target)` does to the twin, from the same start each time. It returns (loss, output)
        for steps, else the output."""
        self.ready(self.twin, run.training)
        args, kwargs, target = self.inputs(run.batch)
        torch.manual_seed(run.batch)
        with self.precision():
            output = call(args, kwargs, target)
        if not run.backward:
            output = detached(output)
        elif not run.step:
            total(output).backward()
        return result(self.twin, (args, kwargs), output)

    def wanted(self, run: Run, setting: Setting, whole: Sequence[str] = ()) -> Result:
        """What the plain model gives, micro-batch by micro-batch. `whole`: see `random_wholes`."""
        chunks, deferred = setting.chunks, bool(setting.options.get("deferred_batch_norm"))
        key = (run.what, run.batch, chunks, deferred, tuple(whole))
        if key not in self.known:
            self.known[key] = self.plain(run, chunks, deferred, whole)
        return self.known[key]

    def raised(self, run: Run) -> Exception | None:
        """What the plain model raises if it gets the whole batch, which `plain` cuts: a slice of a leaf is no leaf."""
        self.ready(self.model, run.training)
        args, kwargs, _ = self.inputs(run.batch)
        try:
            with torch.set_grad_enabled(run.backward), self.precision():
                self.model(*args, **kwargs)
        except Exception as error:
            return error
        return None

    def differences(self, run: Run, setting: Setting, pipe: fxpipe.Pipe, found: Result) -> list[str]:
        """Between what the pipe has given and the plain model: micro-batch by micro-batch, or with the whole batch at
        once where the pipe computes what samples share for all of them. Raises PartlyWhole."""
        whole = random_wholes(pipe) if "random" in self.module.FLAGS else []
        differ = list(differences(found, self.wanted(run, setting, whole), self.tolerance, self.floor))
        graph = pipe.build.graph
        if differ and "replicas" in setting.options and opaques(graph):
            raise PartlyWhole  # of which a slice of a micro-batch may be another thing than the micro-batch
        if not differ or (graph.totals is None and graph.epilogue is None):
            return differ
        differ = list(
            differences(
                found,
                self.wanted(run, replace(setting, options=setting.options | {"chunks": 1}), whole),
                self.tolerance,
                self.floor,
            )
        )
        # Buffers are written, and random numbers drawn, for each micro-batch.
        if differ and (graph.mixed or {"buffers", "random"} & set(self.module.FLAGS)):
            raise PartlyWhole
        return differ

    def plain(self, run: Run, chunks: int, deferred: bool = False, whole: Sequence[str] = ()) -> Result:
        self.ready(self.model, run.training)
        args, kwargs, target = self.inputs(run.batch)
        sizes = split_sizes(run.batch, chunks)
        torch.manual_seed(run.batch)
        seed = new_seed() if "random" in self.module.FLAGS else 0
        modules = [self.model.get_submodule(path) for path in whole]
        outputs = []
        statistics = deferred_batch_norm(self.model) if deferred and run.training else nullcontext()
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(run.backward), self.precision(), statistics:
            for micro_batch, (some_args, some_kwargs) in enumerate(cut((args, kwargs), sizes)):
                own_buffers(self.model)
                # Only where it is needed: in a dispatch mode, ops of autocast round in other places.
                with Seeded(seed, micro_batch, modules) if seed else nullcontext():
                    outputs.append(self.model(*some_args, **some_kwargs))
            output = together(outputs, sizes)
            loss = self.loss(output, target) if run.step else None
        if loss is not None:
            loss.sum().backward()
            output = (loss.detach(), detached(output))
        elif run.backward:
            total(output).backward()
        else:
            output = detached(output)
        return result(self.model, (args, kwargs), output)


def random_wholes(pipe: fxpipe.Pipe) -> list[str]:
    """Submodules that the pipe calls whole and that draw random numbers: one op each, with one seed."""
    ops = [op for stage in pipe.build.program.stages for op in stage.ops if op.random]
    return sorted({op.target.path for op in ops if isinstance(op.target, Opaque)})


def total(output: Any) -> Tensor:
    """A number that every floating-point tensor takes part in, with another gradient at each element; numbers stay
    linear, so that those of micro-batches add up."""
    terms = [index * (leaf.sin() if leaf.dim() else leaf).sum() for index, leaf in enumerate(tensors(output), 1)
             if leaf.is_floating_point()]  # fmt: skip
    return torch.stack([term.double() for term in terms]).sum()


def detached(output: Any) -> Any:
    return join(lambda leaves: leaves[0].detach() if isinstance(leaves[0], Tensor) else leaves[0], [output])


def result(model: nn.Module, call: Any, output: Any) -> Result:
    gradients = {name: kept(parameter.grad) for name, parameter in model.named_parameters()}
    gradients |= {f"input {index}": kept(leaf.grad) for index, leaf in enumerate(tensors(call)) if leaf.requires_grad}
    buffers = {name: b.clone() for name, b in model.named_buffers() if not isinstance(b, Released)}
    return Result(unpacked(output), gradients, buffers)


def kept(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.clone()


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings: what they say is for other tests."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

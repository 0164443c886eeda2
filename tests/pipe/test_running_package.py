"""A package that is loaded once, and bound to tensors as often as they change."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.errors import CompileError
from fxpipe.pipe.running_package import RunningPackage, Scheduler
from fxpipe.pipe.saved.loaded_pipe import bind_here

X = torch.randn(4, 3)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pipe = fxpipe.compile(model(), devices=2, chunks=2)
    pipe(X)
    pipe.save(tmp_path)
    pipe.close()
    return tmp_path


def test_bound_again_it_has_the_other_tensors(folder: Path) -> None:
    live, first, second = RunningPackage(folder), model(), model()
    assert not live.bound
    live.bind(partial(bind_here, first, {}), version=1)
    before = live.scheduler
    torch.testing.assert_close(before.run((X,), 2)[0], first(X))
    live.bind(partial(bind_here, second, {}), version=2)
    assert live.version == 2
    torch.testing.assert_close(live.scheduler.run((X,), 2)[0], second(X))
    for worker in before._workers.values():
        worker.thread.join(30)
        assert not worker.thread.is_alive()
    live.close()
    assert live.package.__name__ not in sys.modules


def test_what_cannot_be_bound_changes_nothing(folder: Path) -> None:
    live, first = RunningPackage(folder), model()
    live.bind(partial(bind_here, first, {}), version=1)

    def fails(package: ModuleType) -> Scheduler:
        raise KeyError(package.__name__)

    with pytest.raises(KeyError):
        live.bind(fails, version=2)
    assert live.version == 1
    torch.testing.assert_close(live.scheduler.run((X,), 2)[0], first(X))
    live.close()


def test_a_package_that_cannot_be_compiled_is_forgotten(folder: Path) -> None:
    stage = folder / "stage0.py"
    stage.write_text(
        stage.read_text().replace("        return ", "        if True:\n            pass\n        return ")
    )
    known = set(sys.modules)
    with pytest.raises(CompileError):
        RunningPackage(folder, backend="eager")
    assert not [name for name in sys.modules.keys() - known if name.startswith("fxpipe_package_")]

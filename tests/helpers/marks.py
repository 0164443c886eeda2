"""Marks of tests: which run by default and which with `pytest -m slow`, and which need a newer PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion


def mostly_slow(values: Iterable[Any], quick: Callable[[Any], bool]) -> list[Any]:
    """The values for `parametrize`, a tuple for several arguments; those that are not quick are marked as slow."""
    return [value if quick(value) else _slow(value) for value in values]


def since_torch(version: str, why: str) -> pytest.MarkDecorator:
    """Skips a test where PyTorch is older: `why` says what older ones do not do."""
    return pytest.mark.skipif(TorchVersion(torch.__version__) < version, reason=f"before PyTorch {version}, {why}")


def _slow(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)

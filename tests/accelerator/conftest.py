"""The tests here need a C++ compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from .simulated_device import missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here, reason = Path(__file__).parent, missing()
    for item in items:
        if here in item.path.parents and item.get_closest_marker("accelerator") and reason:
            item.add_marker(pytest.mark.skip(reason=reason))

"""The versions of fxpipe, torch and Python, as they are installed: torch is not imported, as that takes seconds."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version


def versions() -> str:
    """The versions of fxpipe, torch and Python."""
    return f"fxpipe {version_of('fxpipe')}, torch {version_of('torch')}, Python {platform.python_version()}"


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"

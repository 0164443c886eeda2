"""The versions of fxpipe, torch and Python. Torch is not imported for that, as it takes seconds."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version


def versions() -> str:
    """The versions of fxpipe, torch and Python."""
    torch = getattr(sys.modules.get("torch"), "__version__", None) or version_of("torch")
    return f"fxpipe {version_of('fxpipe')}, torch {torch}, Python {platform.python_version()}"


def version_of(package: str) -> str:
    """The version that is installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"

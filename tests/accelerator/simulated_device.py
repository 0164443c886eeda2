"""A device for tests, "sim:0" to "sim:7": its operators run on the host, and it knows which accesses are not ordered.

    with checked():                 # raises DisorderError at its end
        y = x.to("sim:1")

To torch it is an accelerator like others, with streams, events, memory and pinned memory (device/*.cpp), so autograd's
engine does with it what it does with CUDA. A process that has loaded it keeps it: see `child_process.py`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

KIND, COUNT, MEMORY = "sim", 8, 1 << 34
SOURCES = ("streams.cpp", "operators.cpp", "recurrent.cpp", "graphs.cpp", "interface.cpp")
HERE = Path(__file__).parent / "device"


class DisorderError(AssertionError):
    """Accesses that nothing orders."""


class Span(NamedTuple):
    """An operation with a simulated duration: its stream, its name and line, when it began and ended in seconds of
    `time.perf_counter`."""

    stream: str
    what: str
    start: float
    end: float


def missing() -> str | None:
    """Why the device cannot be built here; None if it can."""
    if compiler() is None:
        return "the test device needs a C++ compiler, and neither c++, g++ nor clang++ is on the path"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "the test device needs Python.h, the headers of Python"
    return None


def compiler() -> str | None:
    asked = os.environ.get("CXX")
    return asked or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def built() -> Path:
    """The shared library, compiled once for each version of its sources, torch and Python, and kept in the user's
    cache. Other processes that want it wait."""
    texts = [path.read_bytes() for path in sorted(HERE.iterdir())]
    told = [*command(Path("source"), Path("library")), torch.__version__, sys.version]
    version = hashlib.sha256(b"\0".join([*texts, *map(str.encode, told)])).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fxpipe-tests"
    library = folder / f"device-{version}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            build(library)
    return library


def build(library: Path) -> None:
    """Compile all sources as one: most of the time goes into the headers of torch."""
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        source, made = Path(scratch) / "device.cpp", Path(scratch) / "device.so"
        source.write_text("".join(f'#include "{HERE / name}"\n' for name in SOURCES))
        done = subprocess.run(command(source, made), capture_output=True, text=True, timeout=550)
        if done.returncode:
            raise RuntimeError(f"the test device does not compile:\n{done.stderr}")
        made.rename(library)


def command(source: Path, library: Path) -> list[str]:
    """The call of the compiler. Without optimization: to compile would take longer than it saves."""
    root = Path(torch.__file__).parent
    folders = [root / "include", root / "include/torch/csrc/api/include", Path(sysconfig.get_path("include"))]
    return [
        compiler() or "c++", "-std=c++20", "-O0", "-w", "-shared", "-fPIC", "-DNDEBUG", "-DAT_PER_OPERATOR_HEADERS",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}", *(f"-I{folder}" for folder in folders),
        str(source), "-o", str(library), f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}",
        "-ltorch_cpu", "-lc10",
    ]  # fmt: skip


@cache
def load() -> None:
    """Make the device known to torch, in this process."""
    torch.ops.load_library(str(built()))
    torch.utils.rename_privateuse1_backend(KIND)
    torch._register_device_module(KIND, device_module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def device_module() -> types.ModuleType:
    """`torch.sim`: what a device's module has, after that of CUDA."""
    module = types.ModuleType(KIND)
    generators = tuple(torch.ops.simulated.generator(index) for index in range(COUNT))

    def index_of(device: object = None) -> int:
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index  # type: ignore[call-overload]
        return torch.accelerator.current_device_index() if index is None else index

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    members = {
        "default_generators": generators,
        "device_count": lambda: COUNT,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "current_device": torch.accelerator.current_device_index,
        "set_device": torch.accelerator.set_device_index,
        "device": lambda device: torch.accelerator.device_index(index_of(device)),
        "Stream": lambda priority=0: torch.Stream(torch.device(KIND, index_of())),
        "Event": torch.Event,
        "current_stream": torch.accelerator.current_stream,
        "stream": lambda stream: stream,  # which is a context
        "get_rng_state": lambda device=None: generators[index_of(device)].get_state(),
        "set_rng_state": lambda state, device=None: generators[index_of(device)].set_state(state),
        "manual_seed_all": manual_seed_all,
        "get_device_properties": lambda device=None: types.SimpleNamespace(name="simulated", total_memory=MEMORY),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
    }
    for name, member in members.items():
        setattr(module, name, member)
    return module


@contextmanager
def checked() -> Iterator[None]:
    """Raises DisorderError at the end of this context for accesses in it that nothing orders."""
    torch.ops.simulated.reset()
    yield
    if found := errors():
        lines = "\n".join(f"  {error}" for error in dict.fromkeys(found))
        raise DisorderError(f"{len(found)} accesses that nothing orders:\n{lines}")


def errors() -> list[str]:
    """What the checker has found since the last reset."""
    found: list[str] = torch.ops.simulated.errors()
    return found


def waits() -> list[str]:
    """Each wait of the host for the device since the last reset: how, and the line."""
    found: list[str] = torch.ops.simulated.waits()
    return found


def spans() -> list[Span]:
    """All operations with a duration since the last reset."""
    rows = [text.split("|") for text in torch.ops.simulated.spans()]
    return [Span(stream, what, float(start), float(end)) for stream, what, start, end in rows]


def launches() -> int:
    """How many times a graph has been launched, in this process."""
    found: int = torch.ops.simulated.launches()
    return found


@contextmanager
def durations(seconds: float, copies: float) -> Iterator[None]:
    """In this context each operation takes so long, and each copy between devices or with the host."""
    torch.ops.simulated.durations(seconds, copies)
    try:
        yield
    finally:
        torch.ops.simulated.durations(0.0, 0.0)

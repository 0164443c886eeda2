"""`fxpipe doctor`: what of this machine affects a pipeline, found by trying it.

    ok      C++ compiler     g++ 12.2: compile_stages=True can use Inductor on the CPU
    slow    threads          4 threads for each of 4 workers, OMP_NUM_THREADS is not set: two workers at once take
                             2.1 times as long as with one thread each. Write OMP_NUM_THREADS=1
    broken  gloo             ...

The findings do not change what a pipe does.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from fxpipe.engines.transports.same_machine import SWITCH
from fxpipe.errors import FxpipeError
from fxpipe.ir.units import show_bytes
from fxpipe.pipe.build.local_cluster import least_seconds
from fxpipe.pipe.verify import environment
from fxpipe.pipe.verify import versions as installed
from fxpipe.runtime.accelerator import present
from fxpipe.torch_internals.capability import LOWEST, TESTED, capabilities

from .compile import compile
from .self_check import WAYS, attempt, is_untested, small_model

OK, SLOW, BROKEN, NONE = "ok", "slow", "broken", "none"
WAIT = 120  # seconds for processes to find each other
RANKS = "pipe over ranks by gloo"
RIGHT = "a call and a step of a small model have the plain model's results"
ROOM = 2**28  # bytes that a folder should have free


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    - `state`: "ok"; "slow" (works, but could be faster); "broken"; or "none" (not here, and not needed).
    - `what`: its name.
    - `text`: what was found.
    - `todo`: what to do about it.
    """

    state: str
    what: str
    text: str
    todo: str = ""


def look() -> Iterator[Finding]:
    """The findings about this machine, one by one; the last checks take some seconds."""
    for check in (versions, torch_internals, cpu, gpus, compiler, threads, shared_memory, temporary_folder, nccl, gloo):
        yield guarded(check.__name__.replace("_", " "), check)


def run() -> Iterator[Finding]:
    """A small model, verified on every device and backend there is."""
    workers, gpus = ["cpu", "cpu"], list(map(str, present()))
    pipes = {"pipe on CPU workers": (workers, "")} | {f"pipe on {gpu}": ([gpu, gpu], "") for gpu in gpus}
    if len(gpus) > 1:
        pipes["pipe over all GPUs"] = gpus, ""
    if gpus:
        pipes["pipe on a GPU and the CPU"] = [gpus[0], "cpu"], ""
    for backend in ("aot_eager", "inductor"):
        pipes[f"stages compiled by {backend}"] = workers, backend
    for what, (devices, backend) in pipes.items():
        if backend == "inductor" and not gpus and compiler().state != OK:
            yield Finding(NONE, what, "not tried without a C++ compiler")
        else:
            yield guarded(what, partial(verified, devices, backend, what))
    for way in WAYS:
        yield guarded(way, partial(tried, way))
    yield guarded(RANKS, lambda: ranks("step", "two ranks have the plain model's loss and gradients"))


def guarded(what: str, check: Callable[[], Finding]) -> Finding:
    """The finding, or that the check itself failed."""
    try:
        return check()
    except Exception as error:
        return Finding(BROKEN, what, f"{type(error).__name__}: {error}")


def table(findings: list[Finding]) -> str:
    rows = [(one.state, one.what, f"{one.text}. {one.todo}".rstrip() if one.todo else one.text) for one in findings]
    return tabulate(rows, tablefmt="plain", disable_numparse=True, maxcolwidths=[None, None, 84])


# The machine ----------------------------------------------------------------------------------------------------------


def versions() -> Finding:
    own = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    todo = f"fxpipe has been tested with torch {TESTED}: "
    if own < LOWEST:
        return Finding(BROKEN, "versions", installed.versions(), f"{todo}install one of them")
    if is_untested():
        return Finding(NONE, "versions", installed.versions(), f"{todo}try this one with `fxpipe doctor --run`")
    return Finding(OK, "versions", installed.versions())


def torch_internals() -> Finding:
    """Whether torch has what fxpipe uses of it that is not public."""
    every = capabilities()
    missing = [one for one in every if not one.there]
    if not missing:
        return Finding(OK, "torch internals", f"all {len(every)} are as fxpipe knows them")
    text = "; ".join(f"without {one.what}: {one.without}" for one in missing)
    todo = f"fxpipe has been tested with torch {TESTED}"
    return Finding(BROKEN if any(one.needed for one in missing) else SLOW, "torch internals", text, todo)


def cpu() -> Finding:
    return Finding(OK, "CPU", environment.cpu())


def gpus() -> Finding:
    if torch.cuda.is_available():
        found = environment.gpus()
        for label in found:
            torch.ones(8, device=label).sum().item()
        return Finding(OK, "GPUs", "; ".join(f"{label} {text}" for label, text in found.items()))
    if torch.version.cuda is None:
        todo = "If there is one, install a torch with CUDA" if shutil.which("nvidia-smi") else ""
        return Finding(NONE, "GPUs", "none: this torch is built for the CPU alone", todo)
    return Finding(NONE, "GPUs", f"none that torch can use (built for CUDA {torch.version.cuda})", "See nvidia-smi")


def compiler() -> Finding:
    """The compiler that Inductor would call, tried on a line of C++."""
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    found = next((path for name in wanted if (path := shutil.which(name))), None)
    todo = "For compile_stages=True on the CPU, install g++ or name a compiler in CXX"
    if found is None:
        return Finding(NONE, "C++ compiler", f"none ({', '.join(wanted)})", todo)
    with tempfile.TemporaryDirectory(prefix="fxpipe-") as folder:
        source = Path(folder, "line.cpp")
        source.write_text('#include <cmath>\nextern "C" double twice(double x) { return 2 * std::fabs(x); }\n')
        line = [found, "-shared", "-fPIC", "-fopenmp", str(source), "-o", str(Path(folder, "line.so"))]
        done = subprocess.run(line, capture_output=True, text=True, timeout=WAIT)
    if done.returncode:
        return Finding(SLOW, "C++ compiler", f"{found} fails: {done.stderr.strip()[-200:]}", todo)
    return Finding(OK, "C++ compiler", f"{found}: compile_stages=True can use Inductor on the CPU")


def threads() -> Finding:
    """How much slower two workers are with torch's number of threads each than with one thread each."""
    count, text = torch.get_num_threads(), environment.threads()
    if count == 1:
        return Finding(OK, "threads", text)
    many = _two_workers()
    try:
        torch.set_num_threads(1)
        one = _two_workers()
    finally:
        torch.set_num_threads(count)
    if many < 1.15 * one:
        return Finding(OK, "threads", text)
    cost = f"{text}: two workers at once take {many / one:.1f} times as long as with one thread each"
    return Finding(SLOW, "threads", cost, "For pipelines of CPU workers, export OMP_NUM_THREADS=1")


def _two_workers() -> float:
    """Seconds for a fixed piece of work on each of two threads at once."""
    a = torch.ones(192, 192)

    def work() -> None:
        for _ in range(40):
            torch.relu(a @ a)

    def both() -> None:
        workers = [Thread(target=work) for _ in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    return least_seconds(both, 0.3)


def shared_memory() -> Finding:
    """The shared memory through which CPU ranks of one machine exchange values."""
    what, folder = "shared memory", Path("/dev/shm")
    if os.environ.get(SWITCH) == "0":
        return Finding(SLOW, what, f"{SWITCH}=0: ranks of this machine use gloo", f"Unset {SWITCH}")
    if not folder.is_dir():
        return Finding(SLOW, what, f"there is no {folder}: ranks of this machine may have to use gloo")
    free = _write_into(folder)
    if free < ROOM:
        todo = "In a container, give it more: docker run --shm-size=1g"
        return Finding(SLOW, what, f"{show_bytes(free)} free in {folder}, which large activations may fill", todo)
    return Finding(OK, what, f"{show_bytes(free)} free in {folder}")


def temporary_folder() -> Finding:
    folder = Path(tempfile.gettempdir())
    free = _write_into(folder)
    what, text = "temporary folder", f"{folder}, {show_bytes(free)} free"
    if free < ROOM:
        return Finding(SLOW, what, text, "Generated code is written there: free some space, or set TMPDIR")
    return Finding(OK, what, text)


def _write_into(folder: Path) -> int:
    """Try to write; how many bytes are free."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix="fxpipe-") as file:
        file.write(bytes(2**16))
        file.flush()
    return shutil.disk_usage(folder).free


# Processes ------------------------------------------------------------------------------------------------------------


def nccl() -> Finding:
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return Finding(NONE, "nccl", "this torch has none: GPUs of several processes need it")
    if not torch.cuda.is_available():
        return Finding(NONE, "nccl", "there, and no GPU to use it")
    version: Any = torch.cuda.nccl.version
    return Finding(OK, "nccl", ".".join(map(str, version())))


def gloo() -> Finding:
    """Two processes add up a number."""
    return ranks("add", "two processes found each other and added up")


def ranks(kind: str, text: str) -> Finding:
    """Run two processes of this machine; `kind` is "add" or "step", see `doctor_ranks.py`."""
    what = "gloo" if kind == "add" else RANKS
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        return Finding(NONE, what, "this torch has no gloo: CPU ranks need it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "fxpipe.api.doctor_ranks", kind]
    started = [
        subprocess.Popen(
            line, env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    begin, said = time.perf_counter(), ""
    try:
        for process in started:
            said = process.communicate(timeout=max(1.0, WAIT - time.perf_counter() + begin))[1] or said
    except subprocess.TimeoutExpired:
        said = f"no answer within {WAIT} seconds"
    finally:
        for process in started:
            process.kill()
            process.wait()
    if any(process.returncode for process in started):
        last = said.strip().splitlines()[-1:] or [f"exit statuses {[process.returncode for process in started]}"]
        todo = "Name the network card in GLOO_SOCKET_IFNAME, as in GLOO_SOCKET_IFNAME=lo" if kind == "add" else ""
        return Finding(BROKEN, what, last[0][-300:], todo)
    return Finding(OK, what, f"{text}, in {time.perf_counter() - begin:.1f} s")


# A small model --------------------------------------------------------------------------------------------------------


def verified(devices: list[str], backend: str = "", what: str = "pipe") -> Finding:
    """A step and a call of a small model on these devices."""
    x = torch.linspace(-1, 1, 16 * 32).sin().view(16, 32)
    start = time.perf_counter()
    pipe = compile(small_model(), devices, 4, schedule="1f1b", compile_stages=backend or False)
    try:
        report = pipe.verify(x, target=torch.zeros(16, 8), loss_fn=nn.MSELoss())
    except FxpipeError as error:
        return Finding(BROKEN, what, str(error).splitlines()[0])
    finally:
        pipe.close()
    if not report.ok:
        return Finding(BROKEN, what, str(report), "Save this with pipe.verify(...).save(path) for an issue")
    seconds = time.perf_counter() - start
    return Finding(OK, what, f"{len(report.compared)} results are the plain model's, in {seconds:.1f} s")


def tried(way: str) -> Finding:
    """What the check of a torch that has not been tested says of one way."""
    wrong = attempt(compile, WAYS[way])
    todo = f"fxpipe has been tested with torch {TESTED}"
    return Finding(BROKEN, way, wrong, todo) if wrong else Finding(OK, way, RIGHT)

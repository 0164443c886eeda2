"""What ranks of tests compute on, and talk over: the CPU and gloo; groups with NCCL's rules; the test device; a GPU.

""              the CPU over gloo
LAZY, EAGER     the CPU over the process group of `rendezvous_group.py`, made by `like_nccl`
SIM             the test device of `tests/accelerator` over such a group
NCCL            GPUs over NCCL: one for each rank, or all ranks on one, as NCCL allows where it takes them for ranks
                of several hosts
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from tests.accelerator.simulated_device import load
from tests.accelerator.simulated_device import missing as no_compiler
from tests.helpers.rendezvous_group import LAZY, register

SIM, NCCL = "sim", "nccl"
DEVICES = {SIM: "sim", NCCL: "cuda"}
BACKENDS = {SIM: f"cpu:gloo,sim:{LAZY}", NCCL: "cpu:gloo,cuda:nccl"}
# Of ranks that share a GPU: no way between them but sockets, and few blocks, so that the kernels of all find a place.
ONE_GPU: Mapping[str, str] = {
    "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
}  # fmt: skip


def device_of(mode: str | None) -> str:
    """The kind of device that ranks of this mode have."""
    return DEVICES.get(mode or "", "cpu")


def device_here() -> str:
    """The kind of device that the ranks of this process's group have."""
    config = str(dist.get_backend_config())  # as in "cpu:gloo,cuda:gloo", whether there is a GPU or not
    return next((DEVICES[mode] for mode, backend in BACKENDS.items() if backend.partition(",")[2] in config), "cpu")


def missing(mode: str | None) -> str | None:
    """Why there cannot be ranks of this mode here; None if there can."""
    if mode == SIM:
        return no_compiler()
    if mode == NCCL and not (torch.cuda.is_available() and dist.is_nccl_available()):
        return "needs a CUDA device and NCCL"
    return None


def settings(mode: str, rank: int, size: int, gpus: int) -> dict[str, str]:
    """What a rank needs in its environment before the group is made, with so many GPUs on the machine."""
    if mode != NCCL:
        return {}
    if gpus >= size:
        return {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    return {**ONE_GPU, "NCCL_HOSTID": f"host-of-{rank}"}


def start(mode: str, rank: int, size: int, **meeting: Any) -> None:
    """Make the group of all ranks, in a process that has used no accelerator yet."""
    if mode == SIM:
        load()
        register(("cpu", "sim"))
    os.environ.update(settings(mode, rank, size, torch.cuda.device_count() if mode == NCCL else 0))
    dist.init_process_group(BACKENDS.get(mode, "gloo"), rank=rank, world_size=size, **meeting)

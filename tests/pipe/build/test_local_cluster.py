"""The machine at hand, measured."""

from __future__ import annotations

from time import process_time
from types import SimpleNamespace

import pytest
import torch

import fxpipe
from fxpipe.errors import PlanError
from fxpipe.ir.cluster.cluster import ASSUMED_CPU_WORKER, ASSUMED_GPU, check, dump, link, load
from fxpipe.ir.cluster.published_clusters import H100
from fxpipe.pipe.build import local_cluster as machine
from fxpipe.pipe.build.local_cluster import cores, cpu_memory


def test_cpu_workers_share_what_there_is() -> None:
    start = process_time()
    cluster = fxpipe.Cluster.detect(workers=2)
    assert process_time() - start < 20  # seconds of computing
    check(cluster)
    assert cluster.labels == ("cpu:0", "cpu:1")
    first, second = cluster.devices
    assert first.memory == second.memory == cpu_memory() // 2
    assert 1e8 < first.flops < 1e14
    assert 1e8 < first.bandwidth < 1e13
    assert 0 < link(cluster, "cpu:0", "cpu:1").latency < 0.1
    assert load(dump(cluster)) == cluster
    assert [one.dtype for one in first.matrices] == ["f64", "f32", "bf16"]
    assert first.matrices[1].peak == first.flops
    with pytest.raises(PlanError, match="workers is 0"):
        fxpipe.detect(workers=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA devices are taken where there are some")
def test_a_worker_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_cpu_flops", lambda dtype: 1e12)  # measured above, for seconds
    assert len(fxpipe.detect().devices) == cores()


@pytest.mark.parametrize(("name", "flops"), [("NVIDIA H100 80GB HBM3", H100.flops), ("Another", ASSUMED_GPU.flops)])
def test_a_gpu_is_as_fast_as_its_data_sheet_says(monkeypatch: pytest.MonkeyPatch, name: str, flops: float) -> None:
    found = SimpleNamespace(name=name, total_memory=12345)
    monkeypatch.setattr(machine, "present", lambda: [torch.device("cuda:1")])
    monkeypatch.setattr(machine, "properties", lambda device: found)
    cpu, gpu = machine.local_cluster(["cpu:0", "cuda:1"]).devices
    assert (cpu.label, cpu.flops) == ("cpu:0", ASSUMED_CPU_WORKER.flops)
    assert (gpu.label, gpu.memory, gpu.flops) == ("cuda:1", 12345, flops)


@pytest.mark.cuda
def test_cuda_devices_and_their_links() -> None:
    cluster = fxpipe.detect()
    count = torch.cuda.device_count()
    assert cluster.labels == tuple(f"cuda:{i}" for i in range(count))
    assert all({"f32", "tf32", "bf16", "f16"} <= {one.dtype for one in device.matrices} for device in cluster.devices)
    assert all(device.flops > 1e12 and device.bandwidth > 1e11 for device in cluster.devices)
    assert len(cluster.links) == count * (count - 1) // 2

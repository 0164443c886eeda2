"""Training loops that users have already: the loss goes down. Skipped where the library is not installed."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPTS = {
    "plain": "torch",
    "language_model": "transformers",
    "diffusion": "diffusers",
    "vision": "timm",
    "lightning_loop": "lightning",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_loop_trains(name: str) -> None:
    pytest.importorskip(SCRIPTS[name])
    losses = import_module(f"benchmarks.integrations.{name}").losses()
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_trainer_trains_a_pipe_as_the_plain_model() -> None:
    pytest.importorskip("transformers")
    trainer = import_module("benchmarks.integrations.language_model").trainer
    assert trainer() == pytest.approx(trainer(pipeline=False), rel=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* kept whole")
@pytest.mark.parametrize("name", ["shards", "base_of_a_model_with_a_head", "experts", "four_bit", "evaluated"])
def test_models_of_hugging_face(name: str) -> None:
    for library in ("transformers", "peft", *(["bitsandbytes"] if name == "four_bit" else [])):
        pytest.importorskip(library)
    pipe, plain = getattr(import_module("benchmarks.integrations.hugging_face"), name)()
    assert pipe == pytest.approx(plain, rel=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* kept whole")
@pytest.mark.parametrize("name", ["adapters", "weight_decomposed", "accelerated"])
def test_models_of_hugging_face_in_float64(name: str) -> None:
    for library in ("transformers", "peft", "accelerate"):
        pytest.importorskip(library)
    pipe, plain = getattr(import_module("benchmarks.integrations.hugging_face"), name)()
    assert pipe == pytest.approx(plain, rel=1e-9)


@pytest.mark.long
def test_a_script_over_ranks_goes_on_after_a_kill(tmp_path: Path) -> None:
    """Its losses are those of a run that nobody has disturbed, to the last bit. The one that is killed initialises
    torch.distributed itself."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = ["--max-restarts", "1", "-m", "benchmarks.integrations.ranks"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    options = ["--steps", "9", "--every", "3"]
    runs = [
        subprocess.Popen([*torchrun, *script, str(killed), *options, "--kill", "5", "--own"], cwd=ROOT),
        subprocess.Popen([*torchrun, *script, str(whole), *options], cwd=ROOT),
    ]
    try:
        assert [run.wait(timeout=240) for run in runs] == [0, 0]
    finally:
        for run in runs:
            run.kill()
    found, wanted = (
        [line.split() for line in (path / "losses.txt").read_text().splitlines()] for path in (killed, whole)
    )
    assert [int(step) for step, _ in found] == [0, 1, 2, 3, 4, *range(3, 9)]
    assert dict(found) == dict(wanted)
    assert all(dict(wanted)[step] == loss for step, loss in found)
    assert float.fromhex(wanted[-1][1]) < float.fromhex(wanted[0][1])


@pytest.mark.slow
def test_a_transformer_over_ranks_is_trained_as_the_plain_model(tmp_path: Path) -> None:
    """Losses, norms and evaluations; stopped half way, and started again."""
    pytest.importorskip("transformers")
    ranks, alone = tmp_path / "ranks", tmp_path / "alone"
    script = ["-m", "benchmarks.integrations.pretrain"]
    options = ["--double", "--steps", "8", "--every", "2"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script]
    for command in (
        [*torchrun, str(ranks), *options, "--until", "4"],
        [*torchrun, str(ranks), *options],
        [sys.executable, *script, str(alone), *options, "--plain"],
    ):
        subprocess.run(command, cwd=ROOT, check=True, timeout=400)
    found, wanted = (
        [line.split() for line in (path / "losses.txt").read_text().splitlines()] for path in (ranks, alone)
    )
    assert [int(row[0]) for row in found] == list(range(8))
    for row, other in zip(found, wanted, strict=True):
        assert list(map(float, row)) == pytest.approx(list(map(float, other)), rel=1e-9)
    assert float(found[-1][1]) < float(found[0][1])


@pytest.mark.slow
def test_trainer_over_ranks_trains_as_the_plain_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    script = ["-m", "benchmarks.integrations.trainer_ranks"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script]
    printed = [
        subprocess.run(command, cwd=ROOT, check=True, timeout=400, capture_output=True, text=True).stdout
        for command in (
            [*torchrun, str(tmp_path / "ranks")],
            [sys.executable, *script, str(tmp_path / "alone"), "--plain"],
        )
    ]
    found, wanted = (
        [float(word) for line in text.splitlines() if line.startswith(("losses", "norms")) for word in line.split()[1:]]
        for text in printed
    )
    assert len(found) == 11
    assert found == pytest.approx(wanted, rel=1e-3)
    assert (tmp_path / "ranks" / "model.safetensors.index.json").exists()

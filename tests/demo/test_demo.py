"""The demo: its models are trained as pipelines exactly as they are alone, and what it shows is what is committed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.demo.run import demo
from fxpipe.demo.transformer import PixelTransformer
from fxpipe.demo.unet import UNet

IMAGES = torch.zeros(64, 1, 16, 16)
PIXELS = torch.zeros(64, 63, dtype=torch.int64)


@pytest.fixture(scope="module")
def unet() -> Iterator[fxpipe.Pipe]:
    pipe = fxpipe.compile(UNet(), devices=4, chunks=8, example_inputs=IMAGES)
    yield pipe
    pipe.close()


def test_the_generated_package(unet: fxpipe.Pipe, golden: Callable[[str, str], None]) -> None:
    for name, text in unet.files.items():
        golden(f"demo/unet/{name}", text)


def test_what_the_pages_show(unet: fxpipe.Pipe, golden: Callable[[str, str], None]) -> None:
    golden("demo/explain.txt", unet.explain() + "\n")
    golden("demo/timeline.svg", unet.build.timeline._repr_svg_())


def test_the_schedule_that_the_pages_show(golden: Callable[[str, str], None]) -> None:
    pipe = fxpipe.compile(UNet(), devices=4, chunks=8, schedule="1f1b")
    pipe.step(IMAGES, target=IMAGES, loss_fn=torch.nn.functional.mse_loss)
    golden("demo/schedule.txt", f"{pipe.schedule}\n")
    golden("demo/steps.py", pipe.files["scheduler.py"])
    pipe.close()


@pytest.mark.parametrize(
    ("model", "inputs"), [pytest.param(UNet(), IMAGES, marks=pytest.mark.slow), (PixelTransformer(), PIXELS)]
)
def test_gradients_are_the_models_own(model: nn.Module, inputs: torch.Tensor) -> None:
    model = model.double()
    torch.manual_seed(0)
    x = torch.randint(17, inputs.shape) if inputs.dtype == torch.int64 else torch.randn(inputs.shape).double()
    pipe = fxpipe.compile(model, devices=4, chunks=8)
    pipe(x).square().mean().backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model(x).square().mean().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[name], p.grad, rtol=1e-9, atol=1e-12, msg=name)
    pipe.close()


@pytest.mark.slow
def test_the_command_with_a_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo(devices=2, chunks=4, steps=2, out=tmp_path, schedule="1f1b")
    printed = capsys.readouterr().out
    assert "1f1b: 2 stages, 4 micro-batches" in printed
    assert "the last step, as measured" in printed
    assert (tmp_path / "unet" / "timeline.svg").is_file()
    assert "Where the time goes" in (report := (tmp_path / "unet" / "report.html").read_text())
    assert "No step was timed" not in report


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo(devices=4, chunks=4, steps=2, out=tmp_path)
    printed = capsys.readouterr().out
    assert "loss, pipe" in printed
    assert "portal: skip" in printed
    assert "shared: embed_weight" in printed
    for folder in ("unet", "pixeltransformer"):
        assert (tmp_path / folder / "package" / "stage1.py").exists()
        for picture in ("stages.svg", "timeline.svg"):
            assert (tmp_path / folder / picture).read_text().startswith("<svg")
        assert "<title>" in (tmp_path / folder / "report.html").read_text()
        told = f"written to {tmp_path / folder}: report.html (open it), stages.svg, timeline.svg, package/\n"
        assert printed.count(told) == 1
    assert printed.count("    def forward") == 1
    assert printed.endswith("Next: docs/start.md, your own model as a pipeline\n")
    assert Path(__file__).parents[2].joinpath("docs/start.md").is_file()

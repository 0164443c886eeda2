"""`fxpipe demo`: train two models as pipelines, and beside each the plain model from the same start.

Nothing is downloaded: the images are the 1,797 handwritten digits that come with scikit-learn.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

from fxpipe.api.compile import compile
from fxpipe.errors import FxpipeError
from fxpipe.pipe.pipe import Pipe
from fxpipe.viz.text_timeline import bars

from .transformer import PixelTransformer
from .unet import UNet

BATCH = 64
SHOWN = 12  # lines of generated code


@dataclass(frozen=True)
class Task:
    """A model, its (input, target) pairs, and its loss."""

    name: str
    model: nn.Module
    inputs: Tensor
    targets: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]


def digits() -> Tensor:
    """The images, [1797, 8, 8], whole numbers from 0 to 16."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise FxpipeError("the demo needs scikit-learn: pip install 'fxpipe[demo]'") from None
    return torch.tensor(load_digits().images, dtype=torch.int64)


def denoising(images: Tensor) -> Task:
    """Noisy digits in, clean digits out, at twice the size."""
    clean = F.interpolate(images[:, None].float() / 16, scale_factor=2)
    noisy = clean + 0.3 * torch.randn_like(clean)
    return Task("U-Net, long skips", UNet(), noisy, clean, F.mse_loss)


def next_pixel(images: Tensor) -> Task:
    """Each pixel from those before it."""
    pixels = images.flatten(1)
    return Task("transformer, shared embedding", PixelTransformer(), pixels[:, :-1], pixels[:, 1:], token_loss)


def token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def batches(task: Task, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`steps` random batches, the same ones for every caller."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randint(len(task.inputs), (BATCH,), generator=generator)
        yield task.inputs[chosen], task.targets[chosen]


def demo(
    devices: int | Sequence[str] = 4,
    chunks: int = 8,
    steps: int = 60,
    out: Path = Path("fxpipe-demo"),
    schedule: str | None = None,
) -> None:
    """Train both models for `steps` steps; print plan, losses, schedule and some code; a report, pictures and the
    generated package of each go to `out`.

    Without a schedule the pipe is called like the model, and autograd runs backward; with one, `step` runs both, and
    the last step is timed."""
    torch.manual_seed(0)
    images = digits()
    for task in (denoising(images), next_pixel(images)):
        folder = out / type(task.model).__name__.lower()
        plain = copy.deepcopy(task.model)
        first = (task.inputs[:BATCH],)
        pipe = compile(task.model, devices=devices, chunks=chunks, schedule=schedule or "gpipe", example_inputs=first)
        print(f"\n== {task.name} ==\n\n{pipe.explain()}\n")
        print(compare_gradients(task, pipe, plain))
        print(train(task, pipe, plain, steps, by_step=schedule is not None))
        print(f"\n{pipe.schedule}\n")
        timeline = pipe.build.timeline if schedule is None else pipe.timeline
        if schedule is not None:
            print(f"the last step, as measured\n{bars(timeline)}\n")
        pipe.save(folder / "package", overwrite=True)
        pipe.draw(folder / "stages.svg")
        timeline.draw(folder / "timeline.svg")
        pipe.report(folder / "report.html")
        if isinstance(task.model, UNet):
            shown = min(1, len(pipe.stages) - 1)
            print(f"how stage {shown} begins, as generated:\n\n{beginning(pipe.stages[shown].source)}\n")
        print(f"written to {folder}: report.html (open it), stages.svg, timeline.svg, package/")
        pipe.close()
    print("Next: docs/start.md, your own model as a pipeline")


def beginning(source: str) -> str:
    """The first lines of the forward of a stage."""
    forward = source[source.index("    def forward") :].splitlines()
    return "\n".join([*forward[:SHOWN], "        ..."])


def compare_gradients(task: Task, pipe: Pipe, plain: nn.Module) -> str:
    """One batch through both: the largest relative difference of any parameter's gradient."""
    inputs, targets = next(batches(task, 1))
    for model in (pipe, plain):
        loss_of(task, model, inputs, targets).backward()
    pairs = zip(pipe.parameters(), plain.parameters(), strict=True)
    gradients = [(a.grad.cpu(), b.grad) for a, b in pairs if a.grad is not None is not b.grad]
    worst = max(float((a - b).norm() / b.norm()) for a, b in gradients)
    for model in (pipe, plain):
        model.zero_grad()
    return f"gradients, pipe against plain model: largest relative difference {worst:.0e} (float32)\n"


def loss_of(task: Task, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """A pipe's output is on the device of its last stage, and there the targets must be."""
    output = model(inputs)
    return task.loss(output, targets.to(output.device))


def train(task: Task, pipe: Pipe, plain: nn.Module, steps: int, by_step: bool) -> str:
    """Train both side by side; the table of their losses."""
    optimizers = [torch.optim.Adam(model.parameters(), lr=2e-3) for model in (pipe, plain)]
    rows = []
    progress = tqdm(batches(task, steps), total=steps, desc=task.name)
    for step, (inputs, targets) in enumerate(progress):
        losses = []
        for model, optimizer in zip((pipe, plain), optimizers, strict=True):
            optimizer.zero_grad()
            if by_step and model is pipe:
                loss = pipe.step(inputs, target=targets, loss_fn=task.loss, timeline=step == steps - 1)
            else:
                loss = loss_of(task, model, inputs, targets)
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
        progress.set_postfix(pipe=f"{losses[0]:.4f}", plain=f"{losses[1]:.4f}")
        if step % (steps // 6 or 1) == 0 or step == steps - 1:
            rows.append((step, *losses, abs(losses[0] - losses[1])))
    return tabulate(
        rows, headers=["step", "loss, pipe", "loss, plain", "difference"], floatfmt=("d", ".6f", ".6f", ".0e")
    )

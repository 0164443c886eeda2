"""Any module, through the whole door: Dynamo, a plan of fxpipe's own, and a pipe that is called as the model is."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import fxpipe
from fxpipe.ir.dead import without_dead_ops
from fxpipe.ir.graph import refs
from fxpipe.ir.legal import legal_cuts
from fxpipe.ir.plan import CHECKPOINT_MODES
from tests.models import Case, total
from tests.random_models import STEPS, Draw, grown, leaves, mask_of_sizes, sample
from tests.random_source import Writer, load
from tests.transparency import assert_same, build, inputs, plain, step

pytestmark = pytest.mark.filterwarnings("ignore:(?s).*computes with the batch size")


# Capture refuses what numbers the samples of the batch, and what writes into inputs.
STEPS_THAT_MAY = [step for step in STEPS if step is not mask_of_sizes]


def check(draw: Draw, folder: Path) -> None:
    graph = grown(draw, STEPS_THAT_MAY, changes_inputs=False)
    keywords = draw((False, True))
    cls = load(Writer(graph, draw).text(keywords), folder)
    names = [ref.name for ref in refs(graph.result)]
    lost = {output.value for output in graph.outputs[:-1] if draw((False, False, True))}

    def made(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = {item.name: sample(item, batch) for item in graph.inputs}
        first = 1 if keywords else len(values)
        return tuple(values.values())[:first], dict(list(values.items())[first:])

    def loss(output: Any) -> Tensor:
        return total([leaf for name, leaf in zip(names, leaves(output), strict=True) if name not in lost])

    traits, random = frozenset({"own-gradients"}), any(op.random for op in graph.ops)
    case = Case(lambda: cls(graph), made, traits, loss, random)
    chunks, batch = draw(range(1, 7)), draw(range(2, 8))
    most = legal_cuts(without_dead_ops(graph)).count(True) - 1
    devices = [f"cpu:{draw(range(3))}" for _ in range(min(draw(range(1, 5)), most))]
    model, twin = build(case), build(case)
    torch.manual_seed(3)
    wanted = plain(case, model, *inputs(case, batch), chunks)
    # The models may count their samples: each micro-batch is a batch of its own here, for the plain model too.
    pipe = fxpipe.compile(twin, devices, chunks, checkpoint=draw(CHECKPOINT_MODES), reduce="cat")
    try:
        torch.manual_seed(3)
        assert_same(step(case, twin, pipe, *inputs(case, batch)), wanted)
    finally:
        pipe.close()


def check_seeds(seeds: range, folder: Path) -> None:
    for seed in seeds:
        torch._dynamo.reset()
        (folder / str(seed)).mkdir()
        try:
            check(Random(seed).choice, folder / str(seed))
        except Exception as error:
            error.add_note(f"seed {seed}: {folder / str(seed)}/random_model.py")
            raise


def test_random_modules_keep_what_they_compute(tmp_path: Path) -> None:
    check_seeds(range(4), tmp_path)


@pytest.mark.slow
def test_sixty_random_modules_keep_what_they_compute(tmp_path: Path) -> None:
    check_seeds(range(100, 160), tmp_path)

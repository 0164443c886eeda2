"""Writes the folder of `fxpipe plan --launch`:

    train.py     the training script
    plan.json    the plan
    launch.sh    starts the ranks of one host
    job.slurm    starts launch.sh on all hosts of a Slurm job

All texts are made before the first is written, so an error leaves no file behind.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from fxpipe.api.profile import ModelProfile
from fxpipe.errors import PlanError
from fxpipe.pipe.results.planned import Planned

from .host_scripts import launch_script, slurm_script
from .made_up_batch import PlannedCall, made_up
from .model_import import ModelImport
from .precision import optimizer_of, precision_of
from .rank_hosts import rank_hosts
from .train_script import ScriptModel, train_script


def check_folder(folder: Path) -> None:
    """Raise PlanError unless the folder is empty, or not there."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PlanError(f"--launch writes into a new folder, and {folder} is not empty: name another")


def launch_files(
    planned: Planned,
    known: ModelProfile,
    model: nn.Module,
    inputs: tuple[Any, ...] | Mapping[str, Any],
    named: ModelImport,
    meta: bool,
    dtype: str | None,
    folder: Path,
) -> dict[str, str]:
    """The texts of the scripts, by name.

    - `known`: the profile of the planned call with these `inputs`.
    - `meta`: whether the model is made on the meta device.
    - `dtype`: the element type that was asked for.

    Raises PlanError if the plan cannot run over ranks, or if there is no loss to train.
    """
    _check_loss(planned, known)
    hosts, precision = rank_hosts(planned), precision_of(planned, dtype)
    data = made_up(PlannedCall(known.graph, inputs, planned.batch, known.sizes, precision.floats))
    made = ScriptModel(
        f"Trains {str(planned).splitlines()[0]}.",  # what was printed of the plan
        os.path.relpath(named.folder, folder.resolve()),
        named.module,
        named.function,
        meta,
        callable(getattr(model, "_init_weights", None)),
    )
    return {
        "train.py": train_script(made, planned.batch, data, *optimizer_of(planned), precision, hosts),
        "launch.sh": launch_script(hosts),
        "job.slurm": slurm_script(hosts, planned.plan.model),
    }


def _check_loss(planned: Planned, known: ModelProfile) -> None:
    """Raise PlanError for a plan with one micro-batch of a model whose loss depends on totals of the batch. The planner
    takes the loss of a micro-batch, which is given the totals; with one micro-batch, what runs has the ops of the whole
    loss instead, and the plan does not name them."""
    whole = planned.layers.micro_batches == 1 and (
        not any(stage.replicas for stage in planned.plan.stages)
        or any(stage.tensor_parallel > 1 for stage in planned.plan.stages)
    )
    if whole and known.graph.totals is not None:
        raise PlanError(
            f"{planned.plan.model} returns its loss, and the plan has one micro-batch, in which the loss has other ops "
            "than were planned: write --micro-batches 2 or more, or let the model return its scores alone"
        )


def write_folder(folder: Path, files: Mapping[str, str], planned: Planned) -> str:
    """Write the files and the plan; returns what the user is told."""
    folder.mkdir(parents=True, exist_ok=True)
    planned.save(folder / "plan.json")
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    names = ", ".join(sorted([*files, "plan.json"]))
    start = f"bash {shlex.quote(str(folder / 'launch.sh'))} --steps 100"
    if "FIRST_HOST" in files["launch.sh"]:
        start = f"launch.sh on each host, as it says, or job.slurm, in {folder}"
    return f"the folder: {folder}, with {names}\nstart it: {start}"

"""The text of `train.py`: a whole training script for a planned model over ranks.

What a user changes comes first, in sections that are marked: model, data, loss, optimizer. The loop below them is the
same for all plans, but for the lines that a plan asks for: autocast, a scaler, the ranks of several hosts.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from string import Template

from fxpipe.codegen.text.line_layout import INDENT, WIDTH, Brackets, layout
from fxpipe.codegen.text.source_names import doc_prose, string

from .made_up_batch import MadeUp
from .precision import Precision
from .rank_hosts import Hosts, in_order, on_cpu


@dataclass(frozen=True)
class ScriptModel:
    """The model as the script makes it.

    - `about`: a line on the plan.
    - `folder`: where its file is, from the folder of the script.
    - `module`, `function`: what is imported.
    - `meta`: whether it is made on the meta device.
    - `own_init`: whether its class has `_init_weights`, as those of transformers, which sets first values.
    """

    about: str
    folder: str
    module: str
    function: str
    meta: bool
    own_init: bool


HEAD = Template('''\
"""$about

    bash launch.sh --steps 100

Written by `fxpipe plan --launch`, to be edited: change what is under YOURS. $made_up,
so that the script runs as it is. Started again, it goes on from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
$imports

import fxpipe

HERE = Path(__file__).resolve().parent
BATCH = $samples  # samples in a step, on all ranks together, as planned
SEED = 0
$ranks''')

RANKS = Template("""\

# The plan's rank of each process: a row for each host, in the order of its $kind. launch.sh has the devices.
RANKS = (
$rows
)
""")

MODEL = Template('''\
def make() -> nn.Module:
    """$what"""
    sys.path.insert(0, str($folder))
    from $imported

$made
    return made[0] if isinstance(made, tuple) else made
''')
META = """Without memory for its weights: each rank then makes those of its own stages."""
WHOLE = """The same on every rank, which keeps its stages. If it is too large for that: `fxpipe plan --meta`."""

DATA = Template('''\
def batch(step: int) -> Any:
    """MADE UP: the arguments of the model in a step$and_target.

    All ranks need the same, and after a restart the same again: they depend on the step alone. fxpipe's docs
    say how each rank loads only what its own stages use, in guides/processes.md.
    """
    random = torch.Generator().manual_seed(step)
$lines
''')

LOSS = Template("""\
def loss_fn(output: Any, target: Tensor) -> Tensor:
$lines
""")

OPTIMIZER = Template('''\
def make_optimizer(pipe: fxpipe.Pipe) -> torch.optim.Optimizer:
    """For the parameters of this rank.$note"""
    return $made
''')

TRAIN = Template("""\
def train(options: argparse.Namespace) -> None:
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("start it by launch.sh, which starts a process for each device of the plan")
$start
    $inputs = batch(0)
    torch.manual_seed(SEED)
    model = make()$convert
    pipe = fxpipe.compile(
        model, plan=HERE / "plan.json", devices=dist.get_world_size(), example_inputs=inputs
    )
    last = fxpipe.last_checkpoint(options.checkpoints)
$materialize    optimizer = make_optimizer(pipe)
$scaler    first = 0
    if last is not None:
        kept = fxpipe.load_checkpoint(last, pipe, optimizer)
        first = kept["step"]
        torch.set_rng_state(kept["rng"])  # of dropout
$load_scaler    if pipe.leads:
        print(f"steps {first} to {options.steps} on {dist.get_world_size()} ranks", flush=True)

    for step in range(first, options.steps):
        $each = batch(step)
$forward
$update
        optimizer.zero_grad()
        if pipe.leads and (step + 1) % options.log_every == 0:
            print(f"step {step + 1:6}  loss {loss.item():.6f}", flush=True)
        if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            folder = options.checkpoints / str(step + 1)
            state = {"step": step + 1, "rng": torch.get_rng_state()$save_scaler}
            fxpipe.save_checkpoint(folder, pipe, optimizer, **state)

    pipe.close()
    dist.destroy_process_group()
""")

ON_CPU = """    dist.init_process_group("gloo", init_method="fxpipe://")"""
ON_GPUS = """\
    if not options.cpu and torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        raise SystemExit("this host has fewer GPUs than the plan wants of it; --cpu tries the script on CPUs")
    dist.init_process_group("gloo" if options.cpu else "cpu:gloo,cuda:nccl", init_method="fxpipe://")"""
OWN_RANK = """\
    os.environ["RANK"] = str(RANKS[int(os.environ["HOST_INDEX"])][int(os.environ["LOCAL_RANK"])])"""

MAIN = Template("""\
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--log-every", type=int, default=1, help="steps")
    parser.add_argument("--save-every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument(
        "--checkpoints", type=Path, default=HERE / "checkpoints", help="a folder that all hosts see"
    )
${cpu}    train(parser.parse_args())


if __name__ == "__main__":
    main()
""")
CPU = """    parser.add_argument("--cpu", action="store_true", help="on CPUs, to try the script")\n"""


def train_script(
    model: ScriptModel, samples: int, data: MadeUp, optimizer: str, zero1: bool, precision: Precision, hosts: Hosts
) -> str:
    """The script. `optimizer` and `zero1`: see `optimizer_of`."""
    parts = [
        _head(model, samples, data, zero1, hosts),
        _yours("the model; another one needs a plan of its own", _model(model)),
        _yours("the data", _data(data)),
        *([_yours("the loss", LOSS.substitute(lines=_indented(data.loss)))] if data.has_target else []),
        _yours("the optimizer", _optimizer(optimizer, zero1)),
        _rule("the loop") + _train(model, data, precision, hosts),
        MAIN.substitute(cpu="" if on_cpu(hosts) else CPU),
    ]
    return "\n\n".join(parts)


def _head(model: ScriptModel, samples: int, data: MadeUp, zero1: bool, hosts: Hosts) -> str:
    imports = (
        ["import torch.nn.functional as F", "from torch import Tensor, nn"]
        if data.has_target
        else ["from torch import nn"]
    )
    imports += ["from torch.distributed.optim import ZeroRedundancyOptimizer"] if zero1 else []
    rows = [f"    ({', '.join(str(place.rank) for place in host)}{',' * (len(host) == 1)})," for host in hosts]
    kind = "CPUs" if on_cpu(hosts) else "GPUs"
    ranks = "" if in_order(hosts) else RANKS.substitute(rows="\n".join(rows), kind=kind)
    about = "\n".join(textwrap.wrap(doc_prose(model.about), WIDTH - 3))
    made_up = "DATA AND LOSS ARE MADE UP" if data.has_target else "DATA ARE MADE UP"
    return HEAD.substitute(about=about, made_up=made_up, samples=samples, imports="\n".join(imports), ranks=ranks)


def _model(model: ScriptModel) -> str:
    name = "make_model"
    alias = "" if model.function == name else f" as {name}"
    made = f"    made = {name}()"
    if model.meta:
        made = f'    with torch.device("meta"):\n{INDENT}{made}'
    return MODEL.substitute(
        what=META if model.meta else WHOLE,
        folder=f"HERE / {string(model.folder)}",
        imported=f"{model.module} import {model.function}{alias}",
        made=made,
    )


def _data(data: MadeUp) -> str:
    target = ", and the target of the loss" if data.has_target else ""
    return DATA.substitute(and_target=target, lines="\n".join(data.batch))


def _optimizer(made: str, zero1: bool) -> str:
    note = " Replicas of a stage share out its state (ZeRO-1), as planned." if zero1 else ""
    return OPTIMIZER.substitute(note=note, made=made)


def _train(model: ScriptModel, data: MadeUp, precision: Precision, hosts: Hosts) -> str:
    device = '"cpu"' if on_cpu(hosts) else '"cpu" if options.cpu else "cuda"'
    start = [] if in_order(hosts) else [OWN_RANK]
    start += [ON_CPU if on_cpu(hosts) else ON_GPUS]
    start += [f"    device = {device}"] if precision.autocast else []
    start += ['    torch.set_float32_matmul_precision("high")  # TF32, as planned'] if precision.products else []
    init = ("init=lambda module, path: model._init_weights(module)",) if model.own_init else ()
    values = layout(Brackets("pipe.materialize(", ("SEED", "checkpoint=last", *init), ")"), 1)
    step = f"loss = pipe.step({data.arguments}{', scaler=scaler' if precision.scaler else ''})"
    cast = f"        with torch.autocast(device, torch.{precision.autocast}):\n    " if precision.autocast else ""
    update = ["fxpipe.clip_grad_norm_(pipe, 1.0)", "optimizer.step()"]
    if precision.scaler:
        update = ["scaler.unscale_(optimizer)", update[0], "scaler.step(optimizer)", "scaler.update()"]
    return TRAIN.substitute(
        start="\n".join(start),
        convert=f".to(torch.{precision.convert})" if precision.convert else "",
        inputs="inputs, _" if data.has_target else "inputs",
        each="inputs, target" if data.has_target else "inputs",
        materialize="\n".join([*values, ""]) if model.meta else "",
        scaler="    scaler = fxpipe.GradScaler(pipe, device)\n" if precision.scaler else "",
        load_scaler='        scaler.load_state_dict(kept["scaler"])\n' if precision.scaler else "",
        save_scaler=', "scaler": scaler.state_dict()' if precision.scaler else "",
        forward=f"{cast}        {step}",
        update="\n".join(f"        {line}" for line in update),
    )


def _yours(what: str, text: str) -> str:
    return _rule(f"YOURS: {what}") + text


def _rule(text: str) -> str:
    line = f"# {text} "
    return line + "-" * (WIDTH - len(line)) + "\n\n\n"


def _indented(lines: Iterable[str]) -> str:
    return "\n".join(INDENT + line for line in lines)

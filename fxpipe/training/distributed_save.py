"""Write a checkpoint from all ranks of a pipe at once.

The files are those of torch.distributed.checkpoint. Its own `save` waits in collectives of the process group: if a rank
is gone, only some of the others get an error, and it does not name the rank. Here the ranks communicate as in all calls
of a pipe, so that all others get an error that names the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from fxpipe.pipe.ranks.loaded_rank_pipe import LoadedRanks
from fxpipe.pipe.ranks.rank_consistency import on_each
from fxpipe.pipe.ranks.rank_pipe import RankPipe

OverRanks = RankPipe | LoadedRanks


def write(path: Path, find: Callable[[], dict[str, Tensor]], pipe: OverRanks) -> None:
    """Write the tensors of this rank, which `find` returns by key; return when the checkpoint is complete. A failure on
    one rank raises its error there, and RankError on all others."""
    planner, writer = DefaultSavePlanner(), FileSystemWriter(path)

    def plan() -> Any:
        planner.set_up_planner(find(), writer.storage_meta(), pipe.leads)
        writer.set_up_storage_writer(pipe.leads)
        return writer.prepare_local_plan(planner.create_local_plan())

    collect = partial(pipe.collect_all, call="save_checkpoint")
    plans, contents = planner.create_global_plan(on_each(collect, plan))
    own = writer.prepare_global_plan(plans)[pipe.place]
    written = on_each(collect, lambda: writer.write_data(planner.finish_plan(own), planner).wait())
    on_each(collect, lambda: writer.finish(contents, written) if pipe.leads else None)

"""Writes the package of a build to a folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fxpipe.codegen.package.package_files import save, with_loss
from fxpipe.codegen.scheduler.message_table import message_table
from fxpipe.errors import PackageError
from fxpipe.ir.program.messages import MessageTable
from fxpipe.pipe.build.build import Build
from fxpipe.pipe.build.build_cache import BuildCache

from .loss_fingerprint import Rows, check_unchanged, rows
from .model_fingerprint import FILE, check_same, text_of


def save_package(cache: BuildCache, made: Build, path: Path, overwrite: bool) -> None:
    """Write the package, with the fingerprints of the model and of the loss function. Raises PackageError if the folder
    is not empty, unless `overwrite` is true, if the model or the loss function has changed since its capture, or if the
    model changes its arguments."""
    if path.exists() and any(path.iterdir()) and not overwrite:
        raise PackageError(f"{path} is not empty; choose another folder, or save(..., overwrite=True)")
    if made.graph.changes:
        raise PackageError(
            f"{made.graph.model} changes its arguments in such a call, as it fills a cache, and a package does not: "
            "call it without, as in pipe(..., use_cache=False) for transformers, then save"
        )
    now: Rows = ()
    if made.graph.loss is not None:
        now = rows(cache.step_capture.loss_fn)
        check_unchanged(made.program.graph.fingerprint, now)
    assert made.source is not None
    check_same(made.source, cache.model)
    files = with_loss(made.files, made.program.graph, now) | {FILE: text_of(made.source)}
    save(made.program, files, path, made.whole, _message_table(cache, made))


def _message_table(cache: BuildCache, made: Build) -> MessageTable | None:
    """The messages of a step, if the package can be loaded over ranks; else None."""
    if not cache.options.ranks and (made.graph.loss is None or cache.options.place is not None):
        return None
    whole = replace(made.program, sharded=frozenset())  # who loads the package has whole parameters
    return message_table(whole, made.schedule)

"""What users do with a pipe over ranks, beside steps."""

from __future__ import annotations

from tests.distributed import cases
from tests.distributed.pool import Pool


def test_training(pool: Pool) -> None:
    """Gradient accumulation, an optimizer, evaluation, and a GradScaler are those of the plain model; each rank may
    drop what belongs to others, and loads what is its own."""
    pool.run(cases.train)


def test_meshes_and_plans(pool: Pool) -> None:
    """The group may be a mesh; the plan may be made before; a later kind of call may need fewer stages."""
    pool.run(cases.mesh)

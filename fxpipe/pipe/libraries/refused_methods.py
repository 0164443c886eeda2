"""Methods of models of libraries that a pipe over ranks cannot do: they are refused before they begin. Without that,
they would fail late, or on some ranks alone, where others have changed their model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fxpipe.errors import FxpipeError

ALONE = "runs the modules of the model itself, not the stages of a pipe: call pipe.generate(...) without it"
WHOLE = "needs all tensors of the model in this process: call pipe.gather() on all ranks, and then it"
REFUSED = {
    "generate_batch": ALONE,
    "init_continuous_batching": ALONE,
    "continuous_batching_context_manager": ALONE,
    "load_adapter": WHOLE,
    "resize_token_embeddings": WHOLE,
    "to_onnx": WHOLE,
    "to_tensorrt": WHOLE,
    "to_torchscript": WHOLE,
    "push_to_hub": "would send the part of one rank: call pipe.save_pretrained(folder) on all, and send the folder",
}


def refused_of(kind: type) -> dict[str, Callable[..., Any]]:
    """The methods of this class that are refused, as methods that raise FxpipeError."""
    return {name: refuse(name) for name in REFUSED if hasattr(kind, name)}


def refuse(name: str) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise FxpipeError(f"{name} {REFUSED[name]}")

    return run

"""The bytes that training keeps on a device whatever it computes: parameters, gradients, and the optimizer's state.

ZeRO calls them model states (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", SC 2020, section 3.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .layer_chain import Chain

# What the replicas of a stage share out, the least first: nothing; the optimizer's state (ZeRO-1, there called P_os);
# also gradients and parameters (ZeRO-3, there P_os+g+p).
OPTIMIZER_SHARDINGS = ("none", "zero1", "zero3")
ZERO = {"zero1": "ZeRO-1", "zero3": "ZeRO-3"}  # what prints call them


HALF = ("bf16", "f16")


def adam_copies(parameters: Mapping[str, int]) -> float:
    """The bytes that training with Adam has in memory for each byte of parameters, given their bytes by element type:
    the parameter, its gradient and two moments; for 16-bit types, moments in f32, and besides a master copy in f32, as
    the optimizer's small steps are lost in 16 bits (Micikevicius et al., "Mixed Precision Training", 2018).

    >>> adam_copies({"f32": 100}), adam_copies({"bf16": 100}), adam_copies({"bf16": 100, "f32": 100}), adam_copies({})
    (4.0, 8.0, 6.0, 4.0)
    """
    held = sum(size * (1 + 1 + 3 * 4 / 2 if dtype in HALF else 4) for dtype, size in parameters.items())
    return held / sum(parameters.values()) if held else 4.0


def counted(parameters: Mapping[str, int]) -> str:
    """What `adam_copies` counts, in words; empty if nothing is in 16 bits."""
    half = " and ".join(dtype for dtype in HALF if parameters.get(dtype))
    if not half:
        return ""
    return (
        f"in memory each parameter in {half} has its gradient in {half}, and in f32 a master copy and Adam's two "
        "moments: 16 bytes for 2, as with parameter_copies=8"
    )


class ModelStates(NamedTuple):
    """Bytes on one device of a stage.

    - `optimizer`: what it keeps for each parameter, and master copies.
    """

    parameters: float
    gradients: float
    optimizer: float


def model_states(
    chain: Chain, first: int, end: int, replicas: int, copies: float, optimizer_sharding: str = "none"
) -> ModelStates:
    """The states on each device of a stage of layers `first` to `end` - 1. Of the `copies` bytes that are in memory for
    each byte of parameters, the first is the parameter, the second its gradient, and the others are the optimizer's.
    With `optimizer_sharding` "zero1" these are shared out evenly over the replicas. With "zero3" all are; and the
    parameters of one layer at a time are gathered, to be used, and have their gradient, as a whole. So at the fullest
    moment the largest layer is there besides, with its gradient (sections 5.3 and 7.2.2).

    >>> from fxpipe.ir.plan.layer_chain import Layer
    >>> chain = Chain("m", 1, (Layer("a", 1, 2, parameters=10), Layer("b", 1, 2, parameters=4)))
    >>> model_states(chain, 0, 1, replicas=2, copies=4)
    ModelStates(parameters=10.0, gradients=10.0, optimizer=20.0)
    >>> model_states(chain, 0, 1, replicas=2, copies=4, optimizer_sharding="zero1")
    ModelStates(parameters=10.0, gradients=10.0, optimizer=10.0)
    >>> model_states(chain, 0, 2, replicas=2, copies=4, optimizer_sharding="zero3")
    ModelStates(parameters=17.0, gradients=17.0, optimizer=14.0)
    >>> model_states(chain, 1, 2, replicas=2, copies=1.5)
    ModelStates(parameters=4.0, gradients=2.0, optimizer=0.0)
    """
    parameters = chain.parameters[end] - chain.parameters[first]
    one, two = min(copies, 1.0), min(copies, 2.0)
    optimizer = (copies - two) * parameters / (1 if optimizer_sharding == "none" else replicas)
    if optimizer_sharding == "zero3" and replicas > 1:
        parameters = parameters / replicas + max(layer.parameters for layer in chain.layers[first:end])
    return ModelStates(one * parameters, (two - one) * parameters, optimizer)

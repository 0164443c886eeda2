"""The bytes that training keeps on a device whatever it computes: parameters, gradients, and the optimizer's state.

ZeRO calls them model states (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", SC 2020, section 3.1).
"""

from __future__ import annotations

from typing import NamedTuple

from .layer_chain import Chain

# Each replica keeps all of the optimizer's state, or its share of it (ZeRO-1, there called P_os).
OPTIMIZER_SHARDINGS = ("none", "zero1")


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
    With `optimizer_sharding` "zero1" these are shared out evenly over the replicas.

    >>> from fxpipe.ir.plan.layer_chain import Layer
    >>> chain = Chain("m", 1, (Layer("a", 1, 2, parameters=10), Layer("b", 1, 2, parameters=4)))
    >>> model_states(chain, 0, 1, replicas=2, copies=4)
    ModelStates(parameters=10.0, gradients=10.0, optimizer=20.0)
    >>> model_states(chain, 0, 1, replicas=2, copies=4, optimizer_sharding="zero1")
    ModelStates(parameters=10.0, gradients=10.0, optimizer=10.0)
    >>> model_states(chain, 1, 2, replicas=2, copies=1.5)
    ModelStates(parameters=4.0, gradients=2.0, optimizer=0.0)
    """
    parameters = chain.parameters[end] - chain.parameters[first]
    one, two = min(copies, 1.0), min(copies, 2.0)
    shards = replicas if optimizer_sharding == "zero1" else 1
    return ModelStates(one * parameters, (two - one) * parameters, (copies - two) * parameters / shards)

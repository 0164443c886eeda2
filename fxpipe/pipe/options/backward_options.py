"""Who computes the gradients of a step, as far as options say it: generated code, or autograd."""

from __future__ import annotations

from fxpipe.pipe.build.compiled.device_graphs import NAME
from fxpipe.schedules.make_schedule import AUTO
from fxpipe.torch_internals.capability import Capability

from .compile_options import Options


def is_coded(options: Options) -> bool:
    """Whether generated code computes the gradients, in the stages where it can."""
    return options.backward == "code" or (options.backward == AUTO and not autograd_because(options))


def autograd_because(options: Options) -> str:
    """What has no generated backward: an option, or torch; "" if nothing stands in its way."""
    plan = options.plan
    shards = options.ranks and plan and plan.optimizer_sharding == "zero3" and any(options.replicas.values())
    found = {
        "compile_stages='device_graphs'": options.compile_stages == NAME,
        "a plan that cuts operators": options.place is not None,
        "a plan that shards parameters (ZeRO-3)": shards,
        "offload": bool(options.offload),
        "this torch": not symbolic_sizes().there,
    }
    return next((name for name, given in found.items() if given), "")


def symbolic_sizes() -> Capability:
    """What generated backward needs of torch."""
    from fxpipe.torch_internals.tracing.tensors_without_memory import SYMBOLIC_SIZES  # late: takes a second

    return SYMBOLIC_SIZES

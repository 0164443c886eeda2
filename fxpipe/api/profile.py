"""`fxpipe.profile`: what the ops of a model cost, estimated for any device or measured on one at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fxpipe.capture.call_arguments import RequestedCall
from fxpipe.codegen.package.load_package import tensors_of, worker_device
from fxpipe.errors import InputError, PlanError, did_you_mean
from fxpipe.ir.cluster.cluster import Cluster, Device
from fxpipe.ir.cluster.matrix_speed import STORED
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.plan.profile import Profile
from fxpipe.ir.sample_lists import BatchDim
from fxpipe.pipe.build.call_binding import batch_size, measured, micro_batch_sizes
from fxpipe.pipe.drop_in_module import check_model
from fxpipe.pipe.options.option_forms import check as check_values
from fxpipe.pipe.options.option_table import PROFILE
from fxpipe.pipe.progress import timed, working
from fxpipe.profiling import estimate
from fxpipe.profiling.calibrate import calibrate
from fxpipe.profiling.cast_types import cast
from fxpipe.runtime import accelerator


@dataclass(frozen=True, repr=False)
class ModelProfile(Profile):
    """A profile with its model, so that `fxpipe.plan` can cut the model.

    - `graph`: the captured model.
    - `sizes`: the numbers of its symbolic sizes.
    - `estimated_for`: the device, or None if the profile was measured.
    - `products`: the element type in which matrices are multiplied, if not that of their result.
    """

    graph: Graph = field(repr=False)
    sizes: Mapping[str, int] = field(default_factory=dict, repr=False)
    estimated_for: Device | None = field(default=None, repr=False)
    products: str | None = field(default=None, repr=False)

    def at(self, rows: int) -> ModelProfile:
        """The estimate for a micro-batch of `rows` samples. Raises ValueError if the profile was measured."""
        if self.estimated_for is None:
            raise ValueError(f"the profile was {self.source} at {self.batch} samples, and nowhere else")
        sizes = {**self.sizes, **dict.fromkeys(_rows(self.graph), rows)}
        made = estimate(self.graph, sizes, self.estimated_for, self.products)
        return replace(self, batch=made.batch, ops=made.ops, sizes=sizes)

    def calibrated(self, device: Device) -> Device:
        """`device`, on which this profile was measured, with the efficiencies that its ops reached: the shares of its
        peak speed and bandwidth. Estimates for the result then agree with the measurement. Raises ValueError if the
        profile was estimated."""
        if self.source != "measured":
            raise ValueError(
                f"the profile is {self.source}; measure one, as in fxpipe.profile(model, x, device='cuda:0')"
            )
        return calibrate(self.graph, self.sizes, self, device)

    @property
    def parameter_bytes(self) -> dict[str, int]:
        """The bytes of the model's parameters by element type, as they are planned."""
        found: dict[str, int] = {}
        for state in self.graph.states:
            if state.kind == "parameter" and isinstance(state.type, TensorType):
                found[state.type.dtype] = found.get(state.type.dtype, 0) + state.type.nbytes(self.sizes)
        return found


def _rows(graph: Graph) -> list[str]:
    """The symbolic sizes that are the number of samples of a micro-batch."""
    cut = {item.name: item.batch_dim for item in graph.inputs}
    return [size.name for size in graph.sizes if size.dim == cut[size.input]]


def profile(
    model: nn.Module,
    *inputs: Any,
    device: str | torch.device | Device | Cluster | None = None,
    batch: int | None = None,
    batch_dim: BatchDim = 0,
    reduce: str | Mapping[str, str] = "auto",
    dtype: str | None = None,
    **kwargs: Any,
) -> ModelProfile:
    """What each op of `model` costs in a call with these arguments: seconds forward and backward, bytes kept for
    backward. Returns a `Profile` that knows its model, for `fxpipe.plan` and `fxpipe.compile`.

    - `device`: for a `Device` of a cluster, or a `Cluster` (its first device), costs are estimated from FLOPs and
      bytes: nothing runs, and the model may be on the meta device. On a torch device, or None (the device of the
      model), costs are measured, op by op.
    - `batch`: samples of a micro-batch; if not given, as many as the arguments have. For a measurement no more than
      that.
    - `batch_dim`, `reduce`: as for `fxpipe.compile`.
    - `dtype`: the element type of an estimate; if not given, that of the model's tensors. "f64", "f32", "bf16" and
      "f16" are for tensors and products; "tf32": f32 with products in TF32; "f8": bf16 with products in float8.

    Raises CaptureError if the model cannot be captured, PlanError or InputError for invalid arguments.

    >>> import torch, fxpipe
    >>> from torch import nn
    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.up = nn.Linear(1024, 1024)
    ...     def forward(self, x):
    ...         return self.up(x).relu()
    >>> from fxpipe.ir.cluster.published_clusters import V100
    >>> with torch.device("meta"):
    ...     print(fxpipe.profile(Net(), torch.zeros(64, 1024), device=V100))
    Net, estimated on V100, batch 64
    name    forward    backward    saved    output    parameters
    linear  22.1 us    22.1 us     262 kB   262 kB    4.2 MB
    relu    5.58 us    5.58 us     262 kB   262 kB    0 B
    total   27.7 us    27.7 us     524 kB   524 kB    4.2 MB
    """
    check_values(PROFILE, locals())
    check_model(model, "profile")
    with timed("capture"):
        from fxpipe.capture import CallCapture  # late: torch's Dynamo takes more than a second

        front = CallCapture(model, batch_dim, reduce=None if reduce == "auto" else reduce, work=working)
        graph, values = front.with_inputs(RequestedCall(inputs, kwargs))
        graph = replace(graph, training=model.training)
    there = device.devices[0] if isinstance(device, Cluster) else device if isinstance(device, Device) else None
    products = None
    if dtype is not None:
        for one in device.devices if isinstance(device, Cluster) else (there,):
            _check_speed(dtype, one)
        graph, products = cast(graph, STORED[dtype]), None if STORED[dtype] == dtype else dtype
    whole = batch_size(graph, values)
    rows = whole if batch is None else batch
    sizes = micro_batch_sizes(graph, values, 1) | dict.fromkeys(_rows(graph), rows)
    with timed("profiling"):
        if there is not None:
            made = estimate(graph, sizes, there, products)
        else:
            assert not isinstance(device, (Device, Cluster))
            with working(f"measuring {graph.model}, op by op"):
                made = _measured(model, graph, values, rows, whole, device)
    return ModelProfile(made.model, made.batch, made.device, made.source, made.ops, graph, sizes, there, products)


def _check_speed(dtype: str, device: Device | None) -> None:
    """Raise PlanError if the device is not known to multiply this type; None stands for one that is measured."""
    if device is None:
        raise PlanError(f"dtype={dtype!r} is for estimates, and what runs here is measured as it is: convert the model")
    known = {one.dtype for one in device.matrices} | {"f32"}
    if dtype not in known:
        raise PlanError(
            f"dtype is {dtype!r}, and {device.label} has no speed for it; it has {', '.join(sorted(known))}: "
            "add one to the device, as in matrices=(MatrixSpeed('bf16', 312e12),)"
        )


def _measured(
    model: nn.Module, graph: Graph, values: tuple[Any, ...], rows: int, whole: int, device: str | torch.device | None
) -> Profile:
    tensors = tensors_of(model)
    where = str(device if device is not None else next((t.device for t in tensors.values()), "cpu"))
    if where == "meta" or any(t.is_meta for t in (*tensors.values(), *filter(torch.is_tensor, values))):
        raise PlanError(
            f"{graph.model} is on the meta device and cannot be run to be measured; say which device to estimate for, "
            "as in fxpipe.profile(model, x, device=cluster)"
        )
    if rows > whole:
        raise InputError(f"batch is {rows}, and the arguments have {whole} samples: give as many to measure with")
    try:
        here = worker_device(where)
    except RuntimeError as error:
        near = did_you_mean(str(where).partition(":")[0], {*accelerator.kinds(), "cpu", "cuda"})
        raise PlanError(f"{where!r} is not a device to measure on: {error}{near}") from None
    return measured(graph, values, tensors, (rows, whole - rows) if rows < whole else (whole,), str(here))

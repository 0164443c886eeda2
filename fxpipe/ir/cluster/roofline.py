"""Seconds on a device by the roofline model (Williams, Waterman and Patterson, "Roofline: an insightful visual
performance model for multicore architectures", 2009): an op takes its floating-point operations at the speed that its
kind reaches, or its bytes at the bandwidth that memory reaches, whichever takes longer.

                  at the speed of
    product       the entry of its element type in `Device.matrices`: peak x efficiency
    any other op  `Device.flops`, and mostly the memory
"""

from __future__ import annotations

from .cluster import Device


def roofline(device: Device, flops: float, moved: float, dtype: str | None = None) -> float:
    """The seconds that `device` takes for `flops` operations on `moved` bytes of memory. `dtype` is the element type of
    a product, a key of `matrix_speed.STORED`; None for any other op."""
    speed = device.flops if dtype is None else reached(device, dtype)
    return max(flops / speed, moved / (device.bandwidth * device.memory_efficiency))


def reached(device: Device, dtype: str) -> float:
    """Floating-point operations per second of large products. A device runs those of a type that it has no entry for
    as it runs any other arithmetic, at `Device.flops`."""
    return next((one.reached for one in device.matrices if one.dtype == dtype), device.flops)


def peak(device: Device, dtype: str) -> float:
    """The most floating-point operations per second of products, as the maker says."""
    return next((one.peak for one in device.matrices if one.dtype == dtype), device.flops)

"""Values as messages: what is sealed is what is read, in the order in which it lay in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxpipe.engines.transports.message_format import FailedElsewhere, blank, failure, nbytes, read, seal

CPU = torch.device("cpu")
VALUES = {
    "contiguous": torch.arange(6.0).view(2, 3),
    "channels last": torch.arange(48.0).view(2, 2, 3, 4).to(memory_format=torch.channels_last),
    "every other": torch.arange(12.0).view(2, 6)[:, ::2],
    "no dimension": torch.tensor(3.5, dtype=torch.float64),
    "nothing in it": torch.empty(0, 3),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "half": torch.arange(4.0).bfloat16(),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_a_tensor(value: Tensor, grad: bool) -> None:
    grad = grad and value.is_floating_point()
    size = value.dtype, tuple(value.shape)
    buffer = seal(value, grad, size, blank(size))
    found = read(buffer, size, None)
    assert buffer.nbytes == nbytes(size) == 64 + value.nbytes
    torch.testing.assert_close(found, value, rtol=0, atol=0)
    assert found.requires_grad == grad
    if value.numel() and torch.empty_like(value).stride() == value.stride():  # dense
        assert found.stride() == value.stride()


def test_what_is_no_tensor() -> None:
    size = torch.int64, ()
    assert read(seal(7, False, size, blank(size)), size, "int") == 7
    assert read(seal(True, False, size, blank(size)), size, "bool") is True
    assert read(seal(None, False, size, blank(size)), size, None) is None
    with pytest.raises(FailedElsewhere):
        read(failure(blank(size)), size, None)


def test_another_shape() -> None:
    size = torch.float32, (2, 3)
    with pytest.raises(ValueError, match=r"shape \[3, 2\] was to be sent .* torch.float32 and \[2, 3\] is expected"):
        seal(torch.zeros(3, 2), False, size, blank(size))

"""The table of element types says what torch says."""

from __future__ import annotations

import pytest
import torch

from fxpipe.ir.graph.dtypes import DTYPES, short_name


@pytest.mark.parametrize("name", DTYPES)
def test_torch_has_the_type_and_its_size(name: str) -> None:
    dtype = getattr(torch, DTYPES[name].torch)
    assert dtype.itemsize == DTYPES[name].size
    assert short_name(dtype) == name

"""What is found out about the results of a run of the plain model."""

from __future__ import annotations

import torch

from fxpipe.capture.opaque.returned_parts import depended_on


def test_results_depend_on_what_autograd_goes_back_to() -> None:
    """Not by way of another given tensor, and not where a gradient is stopped."""
    weight, x, other = (torch.ones(2, requires_grad=True) for _ in range(3))
    given = x * 2
    first, second = (given * 3).unbind()
    assert depended_on([first * weight, "no tensor"], (weight, x, given, other)) == (True, False, True, False)
    assert depended_on([second.detach() + other], (weight, x, given, other)) == (False, False, False, True)
    assert depended_on([given], (given,)) == (True,)
    assert depended_on([torch.ones(2)], (torch.ones(2), weight)) == (False, False)

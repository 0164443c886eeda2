"""A captured graph as operators: which ops of the graph belong to each operator, and what each op puts out, as a view
of what its operator does.

    operator  ops                          views
    conv1     conv2d, relu                 both as the operator puts it out
    q         linear, view, transpose      ...; (sample, 2 of channel, length, 4 of channel)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .operators import OperatorGraph
from .tensor_axes import Axes


@dataclass(frozen=True)
class View:
    """The dimensions of a tensor, each of parts of the dimensions of what an operator puts out. A number over all
    samples has none."""

    operator: str
    axes: Axes


@dataclass(frozen=True)
class Reading:
    """The operators; for each the ops of the graph that belong to it; and for each of those what it puts out."""

    operators: OperatorGraph
    ops: Mapping[str, tuple[str, ...]]
    views: Mapping[str, View]

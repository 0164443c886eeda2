"""A captured graph as operators: which ops of the graph belong to each operator, and the output of each op as a view of
its operator's output.

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
    """A tensor as a view of an operator's output: `axes` says for each dimension of the tensor which parts of the
    output's dimensions it is made of. A number over all samples has no dimensions."""

    operator: str
    axes: Axes


@dataclass(frozen=True)
class Reading:
    """What was read from a captured graph.

    - `operators`: the operators.
    - `ops`: for each operator the ops of the graph that belong to it.
    - `views`: for each op its output.
    """

    operators: OperatorGraph
    ops: Mapping[str, tuple[str, ...]]
    views: Mapping[str, View]

"""Task graphs small enough to compute by hand. A multiplication is a second, a byte takes a second on a link."""

import pytest

from fxpipe.ir.cluster import Cluster, Device, Link
from fxpipe.ir.operators import OperatorGraph
from fxpipe.ir.strategy import Config, Strategy
from fxpipe.soap.kinds import elementwise, features, linear
from fxpipe.soap.simulate import run, simulate, timeline
from fxpipe.soap.tasks import tasks

TWO = Cluster(
    (Device("a", 10**9, 1.0, 1.0, "one"), Device("b", 10**9, 1.0, 1.0, "one")), (Link(("one", "one"), 1.0, 0.0),)
)
X = features("x", 4, 1)
UP = linear("up", X, 2)  # 2 + 2 weights
RELU = elementwise("relu", UP)
GRAPH = OperatorGraph("small", (X, UP, RELU), element=1)
FED = Config((1, 1), (0,))


def seconds_by_elements(part, device):
    """A second for each number put out, two backward."""
    return float(part.elements), 2.0 * part.elements


def times(*configs):
    todo = tasks(GRAPH, TWO, Strategy((FED, *configs)), seconds_by_elements)
    return (
        {
            f"{task.kind} {task.label}": (when.ready, when.start, when.end)
            for task, when in zip(todo, run(todo).values())
        }
        if False
        else {f"{task.kind} {task.label}": (run(todo)[task.key].start, run(todo)[task.key].end) for task in todo}
    )


def test_one_device_does_one_task_after_the_other():
    whole = Config((1, 1), (0,))
    assert times(whole, whole) == {"F up 0": (0, 8), "F relu 0": (8, 16), "B relu 0": (16, 32), "B up 0": (32, 48)}


def test_a_value_and_its_gradient_take_the_link():
    assert times(Config((1, 1), (0,)), Config((1, 1), (1,))) == {
        "F up 0": (0, 8),
        "T up 0 -> relu 0": (32, 40),  # two transfers of the same name: the one of the gradient is kept
        "F relu 0": (16, 24),
        "B relu 0": (24, 40) if False else (24, 40),
        "B up 0": (48, 64),
    }

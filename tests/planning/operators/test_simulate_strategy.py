"""Task graphs small enough to compute by hand. A number takes a second forward and two back, a byte a second on a
link, and a number is a byte."""

from fxpipe.ir.operators.operators import OperatorGraph
from fxpipe.ir.operators.strategy import Config, Strategy
from fxpipe.planning.operators.models.operator_kinds import elementwise, features, layer_norm, linear
from fxpipe.planning.operators.simulate_strategy import run, simulate, timeline
from fxpipe.planning.operators.task_graph import tasks
from tests.helpers.operator_graphs import cluster

TWO = cluster(2, bandwidth=1.0, latency=0.0)
X = features("x", 4, 1)
UP = linear("up", X, 2)  # 2 weights and 2 biases
GRAPH = OperatorGraph("small", (X, UP, elementwise("relu", UP)), element=1)
FED = Config((1, 1), (0,))
ON_A, ON_B = Config((1, 1), (0,)), Config((1, 1), (1,))
BY_SAMPLE, BY_CHANNEL = Config((2, 1), (0, 1)), Config((1, 2), (0, 1))


def seconds(part, device):
    return float(part.elements), 2.0 * part.elements


def times(up, relu):
    todo = tasks(GRAPH, TWO, Strategy((FED, up, relu)), seconds)
    found = run(todo)
    return [(task.kind, task.label, found[task.key].start, found[task.key].end) for task in todo]


def test_one_device_does_one_task_after_the_other():
    assert times(ON_A, ON_A) == [
        ("F", "up 0", 0, 8),
        ("F", "relu 0", 8, 16),
        ("B", "relu 0", 16, 32),
        ("B", "up 0", 32, 48),
    ]


def test_a_value_and_its_gradient_take_the_link():
    assert times(ON_A, ON_B) == [
        ("F", "up 0", 0, 8),
        ("T", "up 0 -> relu 0", 8, 16),
        ("F", "relu 0", 16, 24),
        ("B", "relu 0", 24, 40),
        ("T", "up 0 -> relu 0", 40, 48),
        ("B", "up 0", 48, 64),
    ]


def test_copies_of_weights_exchange_their_gradients_once_all_are_there():
    """Two devices hold 4 bytes: each passes on 2 * (2 - 1) / 2 of them."""
    assert times(BY_SAMPLE, BY_SAMPLE)[-5:] == [
        ("B", "up 0", 16, 24),
        ("B", "up 1", 16, 24),
        ("G", "up", 24, 24),
        ("S", "up", 24, 28),
        ("S", "up", 24, 28),
    ]


def test_weights_cut_in_shards_are_not_exchanged_but_values_move():
    """Each part of relu needs both channels of its samples: 2 numbers of the other device."""
    found = times(BY_CHANNEL, BY_SAMPLE)
    assert [one for one in found if one[0] in "GS"] == []
    assert found[:5] == [
        ("F", "up 0", 0, 4),
        ("T", "up 0 -> relu 1", 4, 6),
        ("F", "up 1", 0, 4),
        ("T", "up 1 -> relu 0", 4, 6),
        ("F", "relu 0", 6, 10),
    ]


def test_a_link_does_first_what_is_ready_first():
    """Both parts of up are on one device, so their messages to the other share its link."""
    found = times(Config((2, 1), (0, 0)), ON_B)
    assert [one[2:] for one in found if one[0] == "T"][:2] == [(4, 8), (8, 12)]


def test_operators_of_one_name_of_weights_exchange_them_together():
    """Two steps of a layer, the first on device 0 and the second on device 1, hold the same weights."""
    first = linear("first", X, 1, shared="w")
    graph = OperatorGraph("steps", (X, first, linear("second", first, 1, shared="w")), element=1)
    todo = tasks(graph, TWO, Strategy((FED, ON_A, ON_B)), seconds)
    assert [(task.label, task.size) for task in todo if task.kind == "S"] == [("w", 2.0), ("w", 2.0)]


DOWN = linear("down", UP, 1)
SUMMED = OperatorGraph("summed", (X, UP, DOWN, elementwise("relu", DOWN)), element=1)


def summed(up, down, relu):
    todo = tasks(SUMMED, TWO, Strategy((FED, up, down, relu)), seconds)
    found = run(todo)
    return [(task.kind, task.label, found[task.key].start, found[task.key].end) for task in todo if task.kind != "F"]


def test_partial_sums_are_added_by_an_all_reduce():
    """A part of down reads the channel of up on its own device. Both have all 4 numbers of down: each device passes on
    2 * (2 - 1) / 2 of them. The copies of relu read and give on their own devices; no weights are held twice."""
    copies = Config((1, 1), (0, 1), 2)
    assert summed(BY_CHANNEL, copies, copies) == [
        ("G", "down", 8, 8),
        ("S", "down", 8, 12),
        ("S", "down", 8, 12),
        ("B", "relu 0", 16, 24),
        ("B", "relu 1", 16, 24),
        ("B", "down 0", 24, 32),
        ("B", "down 1", 24, 32),
        ("B", "up 0", 32, 40),
        ("B", "up 1", 32, 40),
    ]


def test_gradients_of_several_readers_are_added_by_an_all_reduce():
    """Both devices have the sum. Each part of relu gives the gradient of its samples to the holder on its device."""
    assert summed(BY_CHANNEL, Config((1, 1), (0, 1), 2), BY_SAMPLE)[3:] == [
        ("B", "relu 0", 14, 18),
        ("B", "relu 1", 14, 18),
        ("G", "down", 18, 18),
        ("S", "down", 18, 22),
        ("S", "down", 18, 22),
        ("B", "down 0", 22, 30),
        ("B", "down 1", 22, 30),
        ("B", "up 0", 30, 38),
        ("B", "up 1", 30, 38),
    ]


def test_copies_of_a_layer_have_the_same_gradients():
    """Its weights are on both devices, but nothing is exchanged; where its samples are cut as well, it is."""
    graph = OperatorGraph("norm", (X, layer_norm("norm", X)), element=1)
    for config, passed in ((Config((1, 1), (0, 1), 2), []), (Config((2, 1), (0, 1, 1, 0), 2), [2.0, 2.0])):
        todo = tasks(graph, TWO, Strategy((FED, config)), seconds)
        assert [task.size for task in todo if task.kind == "S"] == passed


def test_the_timeline_has_the_spans_of_devices_and_links():
    strategy = Strategy((FED, ON_A, ON_B))
    found = timeline(GRAPH, TWO, strategy, seconds)
    assert found.makespan == simulate(GRAPH, TWO, strategy, seconds) == 64
    assert [(span.where, span.kind, span.start) for span in found.spans] == [
        ("d0", "F", 0),
        ("d0 to d1", "T", 8),
        ("d1", "F", 16),
        ("d1", "B", 24),
        ("d1 to d0", "T", 40),
        ("d0", "B", 48),
    ]

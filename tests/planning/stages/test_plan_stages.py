"""Plans: by time, by memory, by hand; and every request that cannot be met, with what it says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxpipe.errors import PlanError
from fxpipe.ir.cluster.cluster import Cluster, Device, Link
from fxpipe.ir.plan.plan import check
from fxpipe.planning import plan
from tests.helpers.planning_graphs import flat, graph

CPUS = Cluster.of(["cpu:0", "cpu:1", "cpu:2", "cpu:3"])
SIX = graph(*(f"y{n} = linear(y{n - 1}, w{n}) @ {n - 1}.fc" if n else "y0 = relu(x) @ 0" for n in range(7)))


def line(*modules: str):
    before = ["x", *(f"y{n}" for n in range(len(modules)))]
    return graph(*(f"y{n} = relu({before[n]})" + (f" @ {m}" if m else "") for n, m in enumerate(modules)))


def sizes(made, *args, **options):
    found = plan(made, flat(made), CPUS, *args, **options)
    check(found, [op.name for op in made.ops])
    return [len(stage.ops) for stage in found.stages]


def small(memory: int, labels=("cpu:0", "cpu:1")) -> Cluster:
    devices = tuple(Device(label, memory, 1e9, 1e9) for label in labels)
    return Cluster(devices, (Link(("local", "local"), 1e9, 0.0),))


def test_by_time():
    made = line(*"abcdef")
    found = plan(made, flat(made, forward={"y0": 10.0}), CPUS, devices=["cpu:0", "cpu:1"], chunks=4)
    assert [stage.ops for stage in found.stages] == [("y0",), ("y1", "y2", "y3", "y4", "y5")]
    assert [(stage.device, stage.checkpoint) for stage in found.stages] == [
        ("cpu:0", "except_last"),
        ("cpu:1", "except_last"),
    ]
    assert (found.chunks, found.schedule, found.model) == (4, "gpipe", "Net")


def test_within_a_stage_ops_keep_the_order_of_the_user():
    made = graph(
        "a1 = relu(x)", "b1 = relu(x)", "a2 = relu(a1)", "b2 = relu(b1)", "y = add(a2, b2)", "z = relu(y)"
    )  # arranged: a1 a2 b1 b2 y z
    found = plan(made, flat(made), CPUS, devices=["cpu:0", "cpu:1", "cpu:2"], slack=0)
    assert [stage.ops for stage in found.stages] == [("a1", "a2"), ("b1", "b2"), ("y", "z")]
    whole = plan(made, flat(made), CPUS, devices=["cpu:0"])
    assert whole.stages[0].ops == ("a1", "b1", "a2", "b2", "y", "z")


def test_by_memory():
    made = line(*"abcdef")
    profile = flat(made, saved={"y5": 800}, forward={"y0": 10.0})
    found = plan(made, profile, CPUS, devices=["cpu:0", "cpu:1"], cut="memory")
    assert [len(stage.ops) for stage in found.stages] == [5, 1]


def test_memory_binds_the_balance_by_time():
    made = line(*"abcdef")
    profile = flat(made, parameters={"y0": 100, "y1": 100, "y5": 10})
    assert [len(s.ops) for s in plan(made, profile, small(1000)).stages] == [3, 3]
    assert [len(s.ops) for s in plan(made, profile, small(500)).stages] == [1, 5]


def test_too_little_memory_says_which_stage_and_how_much():
    made = line(*"ab")
    profile = flat(made, parameters={"y0": 100, "y1": 200}, saved={"y0": 0, "y1": 0})
    with pytest.raises(PlanError, match=r"stage 1 on cpu:1 needs 808 B of memory and has 500 B, 308 B too little"):
        plan(made, profile, small(500))


def test_a_list_of_blocks():
    made = line("0", "0", "1", "2", "3", "3")
    assert sizes(made, devices=["cpu:0", "cpu:1"], cut=[1, 3]) == [2, 4]
    assert sizes(made, devices=["cpu:0", "cpu:1"], cut=(3, 1)) == [4, 2]


def test_cut_at_modules():
    made = line("encoder.0", "encoder.0", "encoder.1.fc", "encoder.1", "decoder", "head")
    assert sizes(made, devices=["cpu:0", "cpu:1", "cpu:2"], cut=["decoder", "encoder.1"]) == [2, 2, 2]
    assert sizes(made, devices=["cpu:0", "cpu:1"], cut=["encoder.1.fc"]) == [2, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"cut": [2, 3]},
            r"cut=\[2, 3\] adds up to 5, but Net has 4 blocks \(0, 1, 2, 3\): .* cut=\[2, 2\]",
        ),
        ({"cut": [4]}, r"cut=\[4\] is for 1 stages, but there are 2 devices"),
        ({"cut": [4, 0]}, "has a stage without blocks"),
        ({"cut": "speed"}, "cut is 'speed': write one of"),
        ({"cut": ["9"]}, "cut names '9', which is no module that Net runs; close to it are 0, 1, 2"),
        ({"cut": ["0"]}, "no op between the start and 0"),
        ({"cut": ["1", "2"]}, "makes 3 stages, but there are 2 devices"),
        ({"cut": []}, "makes 1 stages, but there are 2 devices"),
        ({"chunks": 0}, "chunks is 0"),
        ({"devices": []}, "devices is empty"),
        ({"devices": ["cuda:7"]}, "no device 'cuda:7' in the cluster; it has cpu:0"),
        ({"devices": ["cpu:0"] * 7}, "cannot be cut into 7 stages: it has 6 ops. Ask for at most 6: devices=6"),
        ({"checkpoint": "sometimes"}, "checkpoint is 'sometimes'"),
        ({"checkpoint": {2}}, "names stage 2, but the stages are 0 to 1"),
    ],
)
def test_refused(options, message):
    with pytest.raises(PlanError, match=message):
        sizes(line("0", "0", "1", "2", "3", "3"), **{"devices": ["cpu:0", "cpu:1"], **options})


def test_two_modules_with_nothing_between():
    made = line("a", "b.c", "b.c")
    with pytest.raises(PlanError, match=r"no op between b and b\.c"):
        sizes(made, devices=["cpu:0", "cpu:1", "cpu:2"], cut=["b", "b.c"])


def test_close_names_are_listed():
    with pytest.raises(PlanError, match=r"close to it are encoder\.1"):
        sizes(line("encoder.1", "head"), devices=["cpu:0", "cpu:1"], cut=["encodr.1"])


def test_a_cut_by_hand_that_tears_a_tuple():
    made = graph("p = chunk(x) : tuple @ 0", "q = getitem(p) @ 1", "r = getitem(p) @ 1", "y = add(q, r) @ 2")
    with pytest.raises(PlanError, match=r"no cut can lie before block '1', at net\.py:2 .* nearest .* net\.py:4"):
        sizes(made, devices=["cpu:0", "cpu:1"], cut=[1, 2])
    with pytest.raises(PlanError, match=r"4 ops, and some must stay together\. Ask for at most 2"):
        sizes(made, devices=["cpu:0", "cpu:1", "cpu:2"])


def test_a_profile_of_another_model():
    with pytest.raises(PlanError, match="for another model"):
        plan(line("a", "b"), flat(line("a")), CPUS)


def test_no_ops():
    made = replace(line("a"), ops=(), outputs=())
    with pytest.raises(PlanError, match="no ops"):
        plan(made, flat(made), CPUS)


def test_a_set_of_stages_recomputes():
    found = plan(SIX, flat(SIX), CPUS, checkpoint={1, 2})
    assert [stage.checkpoint for stage in found.stages] == ["never", "except_last", "except_last", "never"]

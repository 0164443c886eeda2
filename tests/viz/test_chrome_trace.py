"""The Chrome trace: every span is an event, in microseconds, on the thread of its device or link."""

from __future__ import annotations

import json

from fxpipe.ir.timeline import Timeline
from fxpipe.schedules.one_f_one_b import gpipe
from fxpipe.schedules.simulate.simulate import Hop, StageCost, simulate
from fxpipe.viz.chrome_trace import DEVICES, LINKS, trace

STEP = simulate(gpipe(2, 1), [StageCost(0.001, 0.002, saved=100)] * 2, [Hop(0, 1, 0.0005, 0.0005, "x")])


def test_events() -> None:
    events = json.loads(trace(STEP))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [(e["name"], e["cat"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in spans] == [
        ("0F0", "forward", DEVICES, 0, 0, 1000),
        ("x", "transfer", LINKS, 0, 1000, 500),
        ("1F0", "forward", DEVICES, 1, 1500, 1000),
        ("1B0", "backward", DEVICES, 1, 2500, 2000),
        ("gradient of x", "transfer", LINKS, 1, 4500, 500),
        ("0B0", "backward", DEVICES, 0, 5000, 2000),
    ]
    assert spans[1]["args"] == {"stage": 0, "micro_batch": 0, "values": "x"}
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["device 0", "device 1", "device 0 -> device 1", "device 1 -> device 0"]
    memory = [(e["name"], e["ts"], e["args"]["bytes"]) for e in events if e["ph"] == "C"]
    assert memory[:2] == [("memory of device 0", 0, 100), ("memory of device 0", 7000, 0)]


def test_without_links_and_memory() -> None:
    events = json.loads(trace(Timeline("nothing", ("a",), ())))["traceEvents"]
    assert {event["pid"] for event in events} == {DEVICES}
    assert {event["ph"] for event in events} == {"M"}

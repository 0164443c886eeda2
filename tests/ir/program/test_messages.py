"""What moves between processes, kept in a file."""

from __future__ import annotations

import pytest

from fxpipe.ir.program.device_programs import DevicePrograms, Message, Step
from fxpipe.ir.program.gradient_buckets import Bucket
from fxpipe.ir.program.messages import Form, LentTensor, MessageTable, dump, load
from fxpipe.ir.schedule.schedule import Action

X, DX = Message("x", 0, 1, 0), Message("x", 1, 0, 0, gradient=True)
ROWS = (
    (Step("run", Action("F", 0, 0)), Step("send", X, 3), Step("receive", DX), Step("run", Action("B", 0, 0))),
    (Step("receive", X, 3), Step("run", Action("F", 1, 0)), Step("run", Action("B", 1, 0)), Step("send", DX)),
)
MESSAGES = MessageTable(
    programs=DevicePrograms("gpipe", ("cpu:0", "cpu:1"), ROWS),
    replica_groups=(("cpu:0",), ("cpu:1",)),
    names={"x": "x_1"},
    forms={"x": Form("float32", ("b", 4)), "n": Form("int64", (), "int")},
    origins={"x": "net.py:3  x = self.a(x)"},
    sizes=(("b", "image", 0),),
    lent=(LentTensor("w", 0, 1, "a.weight", False, "w_for_1"),),
    makers=(1, -1),
    buckets=(Bucket(1, 0, "f32", True, (("w", (3, 4)), ("v", ())), 2),),
    paths={"w": ("a.weight", False), "v": ("v", True)},
)


def test_back_from_text() -> None:
    text = dump(MESSAGES)
    assert load(text) == MESSAGES
    assert '    ["send", ["x", 0, 1, 0, false, [0, 0]], 3],\n' in text, "a line for each step"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"rows"', '"row"', "programs.row is no field here: did you mean 'rows'"),
        ('["receive", ["x", 0, 1, 0, false, [0, 0]], 3],', "", r"the programs of 'gpipe' cannot run: cpu:\d"),
        ('"float32"', "float32", "not JSON: Expecting value"),
    ],
)
def test_refuses(old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(dump(MESSAGES).replace(old, new))

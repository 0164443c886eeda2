"""How errors name what the user has written."""

from __future__ import annotations

import linecache
import sys
from types import SimpleNamespace

import pytest
import torch

import fxpipe
from fxpipe.errors import file_name, of_user

CELL = "/tmp/ipykernel_7/2218497229.py"
CODE = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        return self.second(x.relu())
"""


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What the user has defined in the third cell of a notebook, as IPython runs it."""
    compiler = SimpleNamespace(format_code_name=lambda name: ("Cell", "In[3]") if name == CELL else None)
    shell = SimpleNamespace(compile=compiler)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(linecache.cache, CELL, (len(CODE), None, CODE.splitlines(keepends=True), CELL))
    found: dict[str, object] = {"__name__": "__main__"}
    exec(compile(CODE, CELL, "exec"), found)
    return found


def test_a_cell_of_a_notebook(notebook: dict[str, object]) -> None:
    net = notebook["Net"]
    assert isinstance(net, type)
    assert file_name(CELL) == "In[3]"
    assert of_user(net.forward) == "forward (In[3]:9)"
    assert file_name(__file__) == "test_errors.py"
    pipe = fxpipe.compile(net(), 2, 2, example_inputs=torch.randn(4, 4))
    assert "# In[3]:11  second  return self.second(x.relu())" in pipe.stages[1].source
    pipe.close()


def test_outside_of_notebooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython may be imported though nothing runs in it."""
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert file_name(CELL) == "2218497229.py"

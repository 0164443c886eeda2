"""The notebook among the examples is the first page of the site, and its cells are as Jupyter wants them."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests.docs.notebook import as_notebook

ROOT = Path(__file__).parents[2]
PAGE, NOTEBOOK = "docs/start.md", "examples/start.ipynb"


def test_it_is_the_page(request: pytest.FixtureRequest) -> None:
    made = as_notebook(PAGE, (ROOT / PAGE).read_text(), str(Path(NOTEBOOK).parent))
    if request.config.getoption("--update-golden"):
        (ROOT / NOTEBOOK).write_text(made)
    assert made == (ROOT / NOTEBOOK).read_text(), "accept with pytest --update-golden"


def test_its_cells() -> None:
    cells = json.loads((ROOT / NOTEBOOK).read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert code[0].startswith("%pip install")
    assert sum("fxpipe.compile" in ast.unparse(ast.parse(text)) for text in code[1:]) == 2
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert not any("```" in "".join(cell["source"]) for cell in cells)


def test_its_links_lead_to_pages() -> None:
    text = as_notebook("docs/guides/page.md", "[a](memory.md), [b](https://pytorch.org)", "examples")
    assert "[a](../docs/guides/memory.md), [b](https://pytorch.org)" in text

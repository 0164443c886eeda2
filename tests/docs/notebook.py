"""A page of the site as a Jupyter notebook: its prose and its code in cells, without what the code prints."""

from __future__ import annotations

import json
import re
from pathlib import PurePosixPath

from tests.docs.page_blocks import FENCE

SETUP = (
    "This notebook is the page [{name}]({up}{name}) of fxpipe's documentation. It runs on a CPU. The next cell "
    "installs fxpipe from the folder above this one, with the PyTorch that it needs; in Colab, clone the repository "
    "and change to its folder `{folder}` (`%cd`) before.",
    "%pip install -q ..",
)


def as_notebook(name: str, page: str, folder: str) -> str:
    """The notebook, as JSON of nbformat 4.5, of the page `name` (a path from the root of the project) in a `folder`."""
    up = "../" * len(PurePosixPath(folder).parts)
    cells = [("markdown", SETUP[0].format(name=name, up=up, folder=folder)), ("code", SETUP[1])]
    last = 0
    for fence in FENCE.finditer(page):
        cells.append(("markdown", _linked(page[last : fence.start()], up + str(PurePosixPath(name).parent))))
        if fence[1].strip() == "python":
            cells.append(("code", fence[2]))
        last = fence.end()
    cells.append(("markdown", _linked(page[last:], up + str(PurePosixPath(name).parent))))
    made = [_cell(index, kind, text.strip()) for index, (kind, text) in enumerate(cells) if text.strip()]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _linked(text: str, folder: str) -> str:
    """The text with its relative links as they are from the notebook, where the page is in `folder`."""
    return re.sub(r"\]\((?!https?:)([^)]+)\)", rf"]({folder}/\1)", text)


def _cell(index: int, kind: str, text: str) -> dict[str, object]:
    cell: dict[str, object] = {"cell_type": kind, "id": f"cell-{index}", "metadata": {}}
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
    return cell | {"source": text.splitlines(keepends=True)}

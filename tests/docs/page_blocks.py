"""The fenced blocks of a page, and what running them prints.

A block is run, or says why not, by its language:

- `python`: run; the blocks of a page share their names.
- `sh`: run, line by line; lines that set up a machine (`pip`, `git` and the like) are not.
- `output`: what the block before prints; `...` stands for anything. `measured`: the same, but numbers may differ.
- `py`: Python that is not run; the paragraph before says why ("Not run here: it needs two machines"), or the page does
  for all of its own ("Not run on this page: ...").
- `json`: parsed. `text`: anything else.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import json
import linecache
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from fxpipe.api.cli.main import main

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SETTING_UP = ("pip", "git", "cd", "source", "export", "python3", "pytest", "sphinx-build")
LANGUAGES = ("python", "sh", "output", "measured", "py", "json", "text")
RUN, PRINTED = ("python", "sh"), ("output", "measured")
UNIT = r"\b(?:ns|us|ms|s|B|kB|MB|GB|x)\b"  # written after numbers


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    - `start`, `end`: where its text is in the page.
    - `line`: the page's line that its text begins in, from 1.
    - `before`: the prose between it and the block or heading before.
    """

    language: str
    text: str
    start: int
    end: int
    line: int
    before: str


def blocks(page: str) -> list[Block]:
    """The blocks in order, without directives such as {toctree}."""
    found, last = [], 0
    for fence in FENCE.finditer(page):
        before = re.split(r"^#+ .*$", page[last : fence.start()], flags=re.MULTILINE)[-1]
        last = fence.end()
        if not fence[1].startswith("{"):
            line = page.count("\n", 0, fence.start(2)) + 1
            found.append(Block(fence[1].strip(), fence[2], fence.start(2), fence.end(2), line, before))
    return found


def check(block: Block, page: str) -> None:
    """Raise AssertionError or SyntaxError for a block of a page that is neither run nor says why."""
    where = f"line {block.line}"
    assert block.language in LANGUAGES, f"{where}: ```{block.language} is none of {', '.join(LANGUAGES)}"
    if block.language == "py" and "Not run on this page: " not in page:
        assert "Not run here: " in block.before, f"{where}: say before the block why it is not run ('Not run here: ')"
        ast.parse(block.text)
    if block.language == "json":
        json.loads(block.text)


def run(name: str, page: str, found: list[Block]) -> Iterator[tuple[Block, str]]:
    """Run the blocks of a page in order; yields each that says what is printed with what has been printed since the one
    before."""
    module = ModuleType("page_" + re.sub(r"\W", "_", name.removesuffix(".md")))
    sys.modules[module.__name__] = module  # as Dynamo looks names up
    lines = page.splitlines(keepends=True)
    linecache.cache[name] = (len(page), None, lines, name)  # captured code shows its lines
    printed = io.StringIO()
    for before, block in zip([None, *found], found, strict=False):
        if block.language in RUN:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                if block.language == "python":
                    exec(compile("\n" * (block.line - 1) + block.text, name, "exec"), module.__dict__)
                else:
                    for command in block.text.replace("\\\n", " ").splitlines():
                        _command(command)
        elif block.language in PRINTED:
            assert before is not None, f"line {block.line}: what prints this?"
            assert before.language in RUN, f"line {block.line}: what prints this?"
            yield block, printed.getvalue()


def _command(command: str) -> None:
    words = shlex.split(command, comments=True)
    if not words or words[0] in SETTING_UP:
        return
    if words[0] == "fxpipe":
        assert main(words[1:]) == 0, command
        return
    here = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=os.environ | here, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    print(done.stdout, end="")


def same(block: Block, printed: str) -> bool:
    """Whether the block shows what was printed."""
    want, got = (text.rstrip() + "\n" for text in (block.text, printed))
    if block.language == "measured":
        want, got = map(without_numbers, (want, got))
    return doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS)


def without_numbers(text: str) -> str:
    """The words of a text, a line each; what stands for numbers, units, bars and spaces is left out.

    >>> without_numbers("forward  1.5 ms"), without_numbers("...\\n")
    ('forward', '...')
    """
    text = re.sub(r"\d+(?:\.\d+)?(?:e[-+]\d+)?", " ", text)
    return "\n".join(re.findall(r"[A-Za-z_]+|\.\.\.", re.sub(UNIT, " ", text)))

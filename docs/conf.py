"""How the site is built: `sphinx-build -W docs build/site`."""

from __future__ import annotations

import re
from importlib.metadata import version as version_of

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

project = "fxpipe"
release = version = version_of("fxpipe")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["pictures"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "fxpipe"
html_show_copyright = False
pygments_dark_style = "monokai"  # Furo's own underlines names of modules
html_static_path = ["_static"]
html_css_files = ["site.css"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_selector = ":not(.highlight-output, .highlight-measured, .highlight-text) > div.highlight > pre"

default_role = "code"  # docstrings write `name`
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 88


def code_in_docstrings(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Lines of a docstring that stand further in, after an empty line, are code: reStructuredText would take them for a
    quotation."""
    text = "\n".join(lines)
    lines[:] = re.sub(r"(?<=\n\n)((?:    [^\n]*\n?)+)", r"::\n\n\1", text).split("\n")


def short_signature(
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """The signature to learn: without `**unknown`, which only makes the error for a misspelled option, and without the
    rules by which files are checked."""
    if signature is not None:
        signature = re.sub(r", \*\*unknown: [^,)]+", "", signature)
        signature = re.sub(
            r"~typing\.Annotated\[(\w+), ~fxpipe\.ir\.dataclass_json\.Rule\([^\]]*\)\]", r"\1", signature
        )
    return signature, returns


def setup(app: Sphinx) -> None:
    app.add_lexer("output", TextLexer)  # what the block before prints, to the letter
    app.add_lexer("measured", TextLexer)  # the same, with numbers that differ from run to run
    app.connect("autodoc-process-docstring", code_in_docstrings)
    app.connect("autodoc-process-signature", short_signature)

"""A page of several sections in one file: tables, bars, pictures that can be enlarged, and code beside the lines that
it was made of.

The page has no script, and a content security policy that allows none and loads nothing: text of users that is not
escaped by mistake does not run either. Arguments named `markup` are HTML already; all others are escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from .svg_elements import FONT, MONO, THEMES, number, shade

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
SIZES = {"fit": "fit", "one": "1×", "two": "2×", "four": "4×"}  # of a picture, by class
RULES = f"""\
* {{ box-sizing: border-box; }}
body {{ font: 0.95rem/1.5 {FONT}; margin: 0 auto; max-width: 1300px; padding: 1rem; background: var(--page);
  color: var(--ink); overflow-wrap: anywhere; }}
nav a {{ margin-right: 1rem; }}
a {{ color: var(--flow); }}
section {{ border-top: 1px solid var(--line); margin-top: 2rem; }}
pre, code {{ font-family: {MONO}; font-size: 0.8rem; margin: 0; }}
summary {{ cursor: pointer; }}
details {{ margin: 0.5rem 0; }}
.quiet {{ color: var(--soft); }}
.advice {{ background: var(--card); border-left: 4px solid var(--arc); padding: 0.6rem 1rem; }}
.scroll {{ overflow: auto; max-height: 80vh; margin: 0.5rem 0; }}
.scroll svg {{ display: block; }}
.picture:has(.fit:checked) svg {{ max-width: 100%; min-width: 44rem; height: auto; }}
.picture:has(.two:checked) svg {{ zoom: 2; }}
.picture:has(.four:checked) svg {{ zoom: 4; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }}
th, td {{ padding: 0.25rem 0.7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }}
th {{ color: var(--soft); font-weight: 600; }}
.text th, .text td, th:first-child, td:first-child {{ text-align: left; }}
th:last-child, td.bar {{ text-align: left; }}
.bar {{ min-width: 16rem; font-size: 0; }}
.bar span, .key {{ display: inline-block; height: 0.9rem; vertical-align: middle; }}
.key {{ width: 0.7rem; height: 0.7rem; margin-right: 0.35rem; }}
.code {{ display: grid; grid-template-columns: minmax(14rem, 2fr) minmax(max-content, 3fr); background: var(--card); }}
.code > * {{ padding: 0.3rem 0.8rem; }}
.code > .from {{ border-right: 1px solid var(--line); white-space: pre-wrap; }}
@media (max-width: 700px) {{
  .code {{ grid-template-columns: minmax(100%, max-content); }}
  .code > .from {{ border: 0; padding-bottom: 0; color: var(--flow); }}
  .code > .from:empty {{ display: none; }}
}}"""


def page(title: str, told: str, sections: Mapping[str, str]) -> str:
    """The text of the file. `told` is below the title; `sections` has for each title its markup."""
    light, dark = (" ".join(f"--{name}: {color};" for name, color in THEMES[theme].items()) for theme in THEMES)
    themes = (
        f":root {{ color-scheme: light dark; {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    )
    links = " ".join(f'<a href="#part{at}">{escape(name)}</a>' for at, name in enumerate(sections))
    parts = "\n".join(
        f'<section id="part{at}">\n<h2>{escape(name)}</h2>\n{markup}\n</section>'
        for at, (name, markup) in enumerate(sections.items())
    )
    body = f"<h1>{escape(title)}</h1>\n{paragraph(told)}\n<nav>{links}</nav>\n{parts}"
    return document(title, f"{themes}\n{RULES}", body)


def document(title: str, style: str, body: str) -> str:
    """The text of an HTML file for screens of any width, which runs no script and loads nothing. `style` and `body` are
    HTML already."""
    return f"""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{style}
</style>
</head>
<body>
{body}
</body>
</html>
"""


def paragraph(text: str, class_: str = "quiet") -> str:
    return f'<p class="{class_}">{escape(text)}</p>'


def lines(texts: Iterable[str]) -> str:
    """A list; nothing if it is empty."""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], text: bool = False) -> str:
    """Rows of cells below their headers. `text`: whether most columns are words, not numbers."""
    head = "".join(f"<th>{escape(name)}</th>" for name in headers)
    body = "\n".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    class_ = ' class="text"' if text else ""
    return f'<div class="scroll"><table{class_}><tr>{head}</tr>\n{body}</table></div>'


def bars(
    kinds: Mapping[str, str], rows: Mapping[str, Mapping[str, float]], shown: Mapping[str, Sequence[str]], last: str
) -> str:
    """A table of amounts with a bar for each row, on one scale.

    - `kinds`: by name of a column the kind of action whose colour it has.
    - `rows`: by label the amount of each kind; `shown`: the cells of the row as text, one for each kind and one for
      the column `last`.
    """
    most = max((sum(amounts.values()) for amounts in rows.values()), default=0) or 1
    colors = {name: shade(kind, 0.5) for name, kind in kinds.items()}
    keys = "".join(
        f'<th><span class="key" style="background: {color}"></span>{escape(name)}</th>'
        for name, color in colors.items()
    )
    body = "\n".join(
        f'<tr>{_cells([label, *shown[label]])}<td class="bar">'
        + "".join(
            f'<span style="width: {number(100 * amounts[name] / most)}%; background: {color}"></span>'
            for name, color in colors.items()
            if amounts[name] > 0
        )
        + "</td></tr>"
        for label, amounts in rows.items()
    )
    return f'<div class="scroll"><table><tr><th></th>{keys}<th>{escape(last)}</th><th></th></tr>\n{body}</table></div>'


def _cells(row: Sequence[str]) -> str:
    return "".join(f"<td>{escape(cell)}</td>" for cell in row)


def picture(svg_markup: str, name: str, size: str = "one") -> str:
    """A picture with a choice of sizes, keys of SIZES. `name` is one of its own on the page."""
    button = f'<input type="radio" name="{escape(name)}" class='
    choices = " ".join(
        f'<label>{button}"{class_}"{" checked" * (class_ == size)}>{text}</label>' for class_, text in SIZES.items()
    )
    return f'<div class="picture"><div class="quiet">size {choices}</div><div class="scroll">{svg_markup}</div></div>'


def folded(title: str, markup: str) -> str:
    """What is shown once its title is clicked."""
    return f"<details><summary><code>{escape(title)}</code></summary>\n{markup}\n</details>"


def listing(text: str) -> str:
    return f'<div class="scroll"><pre>\n{escape(text)}</pre></div>'


def beside(pieces: Sequence[tuple[str, str]]) -> str:
    """Code, in pieces, each with what stands to its left; a listing if nothing does."""
    if not any(left for left, _ in pieces):
        return listing("\n".join(code for _, code in pieces))
    cells = "\n".join(f'<pre class="from">{escape(left)}</pre><pre>\n{escape(code)}</pre>' for left, code in pieces)
    return f'<div class="scroll"><div class="code">\n{cells}\n</div></div>'

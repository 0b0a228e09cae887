"""The frame of a page that stands alone: its style inside, its pictures as data, nothing asked of the network."""

from base64 import b64encode
from html import escape

STYLE = """\
:root { color-scheme: light dark; --page: #fbfbfd; --card: #fff; --ink: #1f2430; --soft: #5b6475; --line: #e3e6ec;
  --flipped: #c2410c; --flipped-bg: #fff1e7; --clean: #475569; --clean-bg: #eef1f6; }
@media (prefers-color-scheme: dark) { :root { --page: #14171d; --card: #1c2028; --ink: #e6e8ee; --soft: #9aa3b5;
  --line: #313744; --flipped: #fb923c; --flipped-bg: #3a2415; --clean: #a9b4c6; --clean-bg: #2a303c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { margin: 0 0 .6rem; font-size: 1.9rem; line-height: 1.2; letter-spacing: -.01em; }
h2 { margin: 2.6rem 0 .5rem; font-size: 1.2rem; }
p { max-width: 52rem; margin: .5rem 0; }
.soft, figcaption, footer { color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .8rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem 1.1rem .45rem 0; border-bottom: 1px solid var(--line); text-align: right; }
th { font-size: .85rem; font-weight: 600; color: var(--soft); vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; padding-right: 2rem; white-space: nowrap; }
tbody tr:last-child td { color: var(--soft); }
pre { overflow-x: auto; padding: .9rem 1.1rem; border: 1px solid var(--line); border-radius: .6rem; background: var(--card);
  font: .85rem/1.5 ui-monospace, Menlo, Consolas, monospace; }
.plots { display: grid; gap: 1.25rem; margin-top: 1.6rem; }
figure { margin: 0; padding: 1rem; border: 1px solid var(--line); border-radius: .6rem; background: var(--card); }
figure img { display: block; width: 100%; height: auto; }
figcaption { margin-top: .5rem; font-size: .875rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(7.2rem, 1fr)); gap: .75rem; padding: 0;
  margin: 1rem 0; list-style: none; }
.tiles li { padding: .6rem; border: 1px solid var(--line); border-radius: .6rem; background: var(--card); }
.tiles img { display: block; width: 100%; aspect-ratio: 1; border-radius: .3rem; image-rendering: pixelated; }
.top { display: flex; justify-content: space-between; align-items: center; margin-bottom: .45rem; font-size: .8rem; }
.mark { padding: 0 .5em; border-radius: 1em; font-weight: 600; color: var(--clean); background: var(--clean-bg); }
.flipped .mark { color: var(--flipped); background: var(--flipped-bg); }
dl { display: grid; grid-template-columns: 1fr auto; margin: .45rem 0 0; font-size: .85rem; line-height: 1.4; }
dt { color: var(--soft); }
dd { margin: 0; font-weight: 600; text-align: right; }
footer { margin-top: 3rem; font-size: .85rem; }"""


def document(title: str, body: str) -> str:
    """The HTML of a whole page; `body` is HTML, `title` is text."""
    return f"""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{STYLE}
</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
{body}
</main>
</body>
</html>
"""


def data_uri(png: bytes) -> str:
    """A PNG as an address that carries it."""
    return f"data:image/png;base64,{b64encode(png).decode()}"


def table(headings: list[str], rows: list[list[str]]) -> str:
    """A table of texts; numbers stand right of the first column."""
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    return f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>'


def paragraph(text: str, *, soft: bool = False) -> str:
    """A paragraph of text, in a softer colour for side remarks."""
    return f"<p{' class=soft' if soft else ''}>{escape(text)}</p>"

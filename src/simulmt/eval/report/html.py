"""Self-contained HTML pages: no scripts, fonts or external files; light and dark."""

from __future__ import annotations

from html import escape

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --faint: #656d76; --line: #d0d7de; --paper: #ffffff;
  --shade: #f6f8fa; --mark: #ffdcd3; --mark-line: #b23c00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --faint: #9aa4ae; --line: #3d444d; --paper: #0d1117;
  --shade: #161b22; --mark: #5b2a18; --mark-line: #ff9b6a; } }
@media print { :root { --ink: #000; --faint: #444; --paper: #fff; --shade: #fff; --mark: #ffdcd3; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 72rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Noto Sans CJK SC", "PingFang SC",
  "Microsoft YaHei", sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.3rem; margin: 2.75rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.75rem 0 .35rem; }
p { max-width: 48rem; margin: .5rem 0; }
.lead, figcaption, .note { color: var(--faint); }
figcaption, .note { font-size: .875rem; max-width: 48rem; }
a { color: inherit; }
nav ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; }
.wide { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .65rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
thead th { vertical-align: bottom; white-space: normal; border-bottom: 2px solid var(--ink); }
tbody tr:nth-child(even) { background: var(--shade); }
th.name, td.name { text-align: left; }
figure { margin: 1rem 0; overflow-x: auto; }
figure svg { height: auto; width: 100%; }
.row { display: flex; flex-wrap: wrap; gap: 1rem; align-items: flex-start; }
.row figure { flex: 1 1 24rem; min-width: 0; margin: 0; }
dl.example { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1rem; margin: .75rem 0;
  padding: .75rem 1rem; background: var(--shade); border: 1px solid var(--line); border-radius: 6px; }
dl.example dt { color: var(--faint); } dl.example dd { margin: 0; overflow-wrap: anywhere; }
mark { background: var(--mark); color: inherit; text-decoration: underline 2px var(--mark-line); }
code, .signature { font: .8125rem/1.5 ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
details { margin: .75rem 0; } summary { cursor: pointer; }
@media (max-width: 40rem) { dl.example { grid-template-columns: 1fr; } dl.example dd { margin-bottom: .5rem; } }
"""


def page(title: str, body: str) -> str:
    """Return a complete document; `body` is HTML."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}</body>\n</html>\n"
    )


def paragraph(text: str, kind: str = "") -> str:
    return f"<p{_class(kind)}>{escape(text)}</p>\n"


def picture(svg: str, caption: str) -> str:
    """Return a figure with a caption."""
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>\n"


def row(*parts: str) -> str:
    """Return parts side by side, if there is room."""
    return f'<div class="row">{"".join(parts)}</div>\n'


def folded(summary: str, content: str) -> str:
    """Return collapsed content."""
    return f"<details><summary>{escape(summary)}</summary>\n{content}</details>\n"


def items(texts: list[str], kind: str = "signature") -> str:
    return "<ul>" + "".join(f"<li{_class(kind)}>{escape(text)}</li>\n" for text in texts) + "</ul>\n"


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""

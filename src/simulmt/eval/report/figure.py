"""Style and saving of plots: sizes, colours, glyphs, SVG and PNG.

Colours are Okabe and Ito's, which are safe for colour-blind readers, and systems also differ in markers. Everything
else is drawn in INK, which becomes the page's text colour in inline SVG, for light and dark pages.

SVG keeps text as text, so it can be searched and browsers supply the glyphs. PNG needs a local font; `save_figure`
warns if there is none for Chinese.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from simulmt.errors import needs_extra
from simulmt.text.words import is_spaceless

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#1f2328"
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6d3b", "#7a7a7a")
MARKERS = ("o", "s", "D", "p", "h", "8", "^", "v")
PNG_DPI = 160

# Fonts with Chinese glyphs on Linux, macOS and Windows, best first.
CHINESE_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans SC",
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "PingFang SC",
    "Hiragino Sans GB",
    "Microsoft YaHei",
    "SimHei",
    "Droid Sans Fallback",
    "Noto Sans CJK JP",
)
FONT_ADVICE = (
    "no font with Chinese glyphs was found, so {path} shows boxes; the SVG next to it displays correctly in a browser. "
    "Install a font (Debian and Ubuntu: apt install fonts-noto-cjk) and run the command again"
)

_STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 10.0,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 11.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "simulmt",  # makes element ids deterministic
}


class Saved(NamedTuple):
    """Files of a plot, and a warning, if any."""

    paths: tuple[Path, Path]
    advice: str | None


@contextmanager
def drawing(width: float, height: float) -> Iterator[Figure]:
    """Yield an empty figure (size in inches) in the common style."""
    with needs_extra("plotting", "eval"):
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    with rc_context(_STYLE):
        yield Figure(figsize=(width, height))


def save_figure(figure: Figure, stem: Path) -> Saved:
    """Write STEM.svg and STEM.png."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    svg, png = stem.with_name(f"{stem.name}.svg"), stem.with_name(f"{stem.name}.png")
    svg.write_text(svg_text(figure), encoding="utf-8")
    glyphs_missing = not _set_glyph_font(figure)
    with _ignore_missing_glyphs():
        figure.savefig(png, dpi=PNG_DPI, facecolor="white")
    return Saved((svg, png), FONT_ADVICE.format(path=png) if glyphs_missing else None)


def svg_text(figure: Figure) -> str:
    """Return a figure as a deterministic SVG document."""
    from matplotlib import rc_context

    _set_glyph_font(figure)
    buffer = io.StringIO()
    with rc_context({key: _STYLE[key] for key in ("svg.fonttype", "svg.hashsalt")}), _ignore_missing_glyphs():
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def inline_svg(figure: Figure, title: str) -> str:
    """Return a figure as inline SVG in the page's text colour; `title` is its text alternative."""
    svg = svg_text(figure)
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)  # groups are never referenced, and ids must be unique in a page
    svg = svg.replace(INK, "currentColor")
    # Scale with the page, but scroll on small screens instead of becoming unreadable.
    size = r'\1 style="max-width:\2pt;min-width:min(\2pt,34rem)"'
    svg = re.sub(r'(<svg[^>]*?) width="([\d.]+)pt" height="[\d.]+pt"', size, svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)


def contrasting_ink(colour: str) -> str:
    """Return black or white, whichever contrasts more with a colour."""
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else "#000000"


def has_ideographs(text: str) -> bool:
    return any(map(is_spaceless, text))


def chinese_font() -> str | None:
    """Return an installed font with Chinese glyphs, if any."""
    from matplotlib.font_manager import fontManager

    if not set(CHINESE_FONTS) & set(fontManager.get_font_names()):
        _find_new_fonts()
    installed = set(fontManager.get_font_names())
    return next((name for name in CHINESE_FONTS if name in installed), None)


def _find_new_fonts() -> None:
    """Add fonts installed since Matplotlib cached its font list."""
    from matplotlib.font_manager import findSystemFonts, fontManager

    known = {font.fname for font in fontManager.ttflist}
    for path in sorted(set(findSystemFonts()) - known):
        with suppress(OSError, RuntimeError, ValueError):  # skip files that are not valid fonts
            fontManager.addfont(path)


def _set_glyph_font(figure: Figure) -> bool:
    """Set a font with ideographs where needed; return False if there is none."""
    from matplotlib.text import Text

    texts: list[Any] = [text for text in figure.findobj(Text) if has_ideographs(text.get_text())]
    font = chinese_font() if texts else None
    for text in texts:
        text.set_fontfamily(["DejaVu Sans", font or "sans-serif"])
    return not texts or font is not None


@contextmanager
def _ignore_missing_glyphs() -> Iterator[None]:
    """Ignore Matplotlib's warnings about missing glyphs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        yield

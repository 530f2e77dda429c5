from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from simulmt.errors import MissingExtraError
from simulmt.eval.report import figure as module
from simulmt.eval.report.figure import INK, contrasting_ink, drawing, has_ideographs, inline_svg, save_figure, svg_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def lettered(*texts: str) -> Figure:
    """A figure that says something."""
    with drawing(2, 2) as figure:
        axes = figure.subplots()
        axes.plot([1, 2], [1, 2], marker="o")
        for place, text in enumerate(texts):
            axes.text(1, 1 + place / 4, text)
        return figure


def test_a_picture_is_saved_as_svg_and_png(tmp_path: Path) -> None:
    saved = save_figure(lettered("plain"), tmp_path / "new" / "ctc+asn.k3")
    assert [path.name for path in saved.paths] == ["ctc+asn.k3.svg", "ctc+asn.k3.png"]
    assert ElementTree.parse(saved.paths[0]).getroot().tag.endswith("svg")
    assert saved.paths[1].read_bytes().startswith(b"\x89PNG")
    assert saved.advice is None


def test_the_same_picture_is_the_same_file() -> None:
    assert svg_text(lettered("a")) == svg_text(lettered("a"))


def test_text_stays_text() -> None:
    root = ElementTree.fromstring(svg_text(lettered("老桥", "bridge")))
    texts = {element.text for element in root.iter() if element.tag.endswith("text")}
    assert {"老桥", "bridge"} <= texts


def test_without_a_chinese_font_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHINESE_FONTS", ())
    saved = save_figure(lettered("老桥"), tmp_path / "bridge")
    assert saved.advice is not None
    assert "apt install fonts-noto-cjk" in saved.advice
    assert str(saved.paths[1]) in saved.advice
    assert "老桥" in saved.paths[0].read_text(encoding="utf-8")
    assert save_figure(lettered("bridge"), tmp_path / "latin").advice is None


def test_a_chinese_font_is_used_for_chinese_text_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "CHINESE_FONTS", ("No Such Font", "STIXGeneral"))  # as if it had Chinese glyphs
    figure = lettered("老桥", "bridge")
    assert save_figure(figure, tmp_path / "bridge").advice is None
    families = {text.get_text(): text.get_fontfamily() for text in figure.axes[0].texts}
    assert families == {"老桥": ["DejaVu Sans", "STIXGeneral"], "bridge": ["DejaVu Sans"]}


def test_fonts_installed_since_matplotlib_looked_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from matplotlib import font_manager

    new, broken = tmp_path / "new.ttf", tmp_path / "broken.ttf"
    new.touch()
    broken.touch()
    added: list[str] = []

    def add(path: str) -> None:
        if path == str(broken):
            raise RuntimeError("not a font")
        added.append(path)

    monkeypatch.setattr(module, "CHINESE_FONTS", ("No Such Font",))
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: [str(broken), str(new)])
    monkeypatch.setattr(font_manager.fontManager, "addfont", add)
    assert module.chinese_font() is None
    assert added == [str(new)]


def test_an_inline_picture_takes_the_colour_of_the_page() -> None:
    inline = inline_svg(lettered("a"), 'what "k" < 3 & more does')
    root = ElementTree.fromstring(inline)
    assert root.attrib["aria-label"] == 'what "k" < 3 & more does'
    assert INK not in inline
    assert "currentColor" in inline
    assert "height" not in root.attrib
    assert not any(element.tag.endswith("metadata") for element in root.iter())


def test_inline_pictures_do_not_repeat_ids_and_refer_to_their_own() -> None:
    page = inline_svg(lettered("a"), "") + inline_svg(lettered("b"), "")
    ids = Counter(re.findall(r'\bid="([^"]+)"', page))
    for (
        name,
        count,
    ) in ids.items():  # the same id twice is the same thing twice: a marker or a clipping of equal content
        assert count == 1 or len(set(re.findall(rf'<[^>]*id="{name}".*?/>', page, re.DOTALL))) == 1
    for reference in re.findall(r'(?:href="#|url\(#)([^")]+)', page):
        assert reference in ids
    assert set(re.findall(r'"(https?://[^"]+)"', page)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


@pytest.mark.parametrize(("colour", "ink"), [("#0072b2", "#ffffff"), ("#e69f00", "#000000"), ("#000000", "#ffffff")])
def test_letters_can_be_read_on_a_colour(colour: str, ink: str) -> None:
    assert contrasting_ink(colour) == ink


def test_ideographs_are_told_from_other_letters() -> None:
    assert has_ideographs("b。")
    assert has_ideographs("𠀀")
    assert not has_ideographs("ä ▁ · → é")


def test_matplotlib_is_loaded_only_to_draw_and_no_backend_is_chosen() -> None:
    program = """
import sys
import simulmt.eval.report.plots as plots
from simulmt.eval.order import Anticipation
assert not any(name.startswith("matplotlib") for name in sys.modules)
plots.anticipation_figure([Anticipation("a", "gold", "word", "word", 1, 1, (0.5,))])
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"simulmt\[eval\]"), drawing(1, 1):
        pass

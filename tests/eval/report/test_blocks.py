from __future__ import annotations

from simulmt.eval.report.blocks import Chapter, Figures, Picture, Table, render_html, render_markdown


def test_markdown_and_html_are_escaped() -> None:
    table = Table(["name", "a|b"], [["<x>", "1"]])
    assert table.markdown() == "| name | a&#124;b |\n| :--- | ---: |\n| <x> | 1 |\n"
    html = render_html("a & b", [Chapter("<test>", [table])], systems=["<ctc>"], dates=[])
    assert "<h1>a &amp; b</h1>" in html
    assert "Systems: &lt;ctc&gt;.</p>" in html
    assert '<h2 id="c0">&lt;test&gt;</h2>' in html
    assert '<th scope="col">a|b</th>' in html
    assert '<td class="name">&lt;x&gt;</td><td>1</td>' in html


def test_chapters_of_figures_alone_are_not_in_the_markdown() -> None:
    chapter = Chapter("Z", [Figures([Picture("<svg></svg>", "Z & I")])])
    assert render_markdown("title", [chapter]) == "# title\n"
    assert "<figure><svg></svg><figcaption>Z &amp; I</figcaption></figure>" in render_html(
        "title", [chapter], systems=[], dates=[]
    )

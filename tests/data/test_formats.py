from __future__ import annotations

import gzip
import lzma
import tempfile
from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulmt.data.corpus import Pair, ParallelFiles, TranslationMemory, WmtTestSet, read_references, read_sentences
from simulmt.errors import DataError

MEMORY = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE tmx SYSTEM "tmx14.dtd">
<tmx version="1.4">
  <header srclang="en" segtype="sentence"/>
  <body>
    <tu>
      <prop type="x">not a sentence</prop>
      <tuv xml:lang="en-GB"><seg>The <bpt i="1">&lt;b&gt;</bpt>red<ept i="1">&lt;/b&gt;</ept> boat
        sails<ph x="2">&lt;br/&gt;<sub>a tip</sub></ph>.</seg></tuv>
      <tuv xml:lang="DE"><seg>Das <hi type="b">rote</hi> Boot segelt &amp; wartet.</seg></tuv>
    </tu>
    <tu><tuv xml:lang="en"><seg>Only here.</seg></tuv><tuv xml:lang="fr"><seg>Seul ici.</seg></tuv></tu>
    <tu>
      <tuv lang="de_AT"><seg>Der Wind dreht.</seg></tuv><tuv lang="en_us"><seg>The wind turns.</seg></tuv>
      <tuv lang="en"><seg>The wind is turning.</seg></tuv>
    </tu>
  </body>
</tmx>
"""
BOMB = """<?xml version="1.0"?>
<!DOCTYPE tmx [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;">]>
<tmx><body><tu><tuv xml:lang="en"><seg>&b;</seg></tuv></tu></body></tmx>
"""
EXTERNAL = BOMB.replace('"ha"', 'SYSTEM "file:///etc/hostname"').replace("&b;", "&a;")
UNDECLARED = '<!DOCTYPE tmx SYSTEM "x.dtd">\n<tmx><tu><tuv lang="en"><seg>&who;</seg></tuv></tu></tmx>'

WMT = """<?xml version='1.0' encoding='utf-8'?>
<dataset id="invented2026.en-de">
  <collection id="general">
    <doc origlang="en" id="harbour">
      <src lang="en"><p><seg id="1">The tide is  low.</seg>
        <seg id="2">Nobody fishes &amp; nobody sings.</seg></p></src>
      <ref lang="de" translator="A"><p><seg id="1">Es ist Ebbe.</seg><seg id="2">Niemand fischt.</seg></p></ref>
      <ref lang="de" translator="C"><p><seg id="1">Ebbe.</seg><seg id="2">Keiner fischt oder singt.</seg></p></ref>
      <hyp system="online"><p><seg id="1">x</seg><seg id="2">y</seg></p></hyp>
    </doc>
    <doc origlang="de" id="inland">
      <src lang="en"><p><seg id="1">It rains.</seg></p></src>
      <ref lang="de" translator="B"><p><seg id="1">Regen fällt.</seg></p></ref>
      <ref lang="de" translator="C"><p><seg id="1">Es gießt.</seg></p></ref>
      <ref lang="de" translator="A"><p><seg id="1">Es regnet.</seg></p></ref>
    </doc>
  </collection>
</dataset>
"""
SGM = """<refset setid="invented" srclang="any" trglang="en">
<doc sysid="ref1" docid="one">
<hl><seg id="1"> AT&T &amp; others </seg></hl>
<p>
<SEG id="2">a line
that goes on &#228;&copy</SEG>
</p></doc>
<doc sysid="ref2" docid="one"><seg id="1">AT and T</seg><seg id="2">one line</seg></doc>
<DOC docid="two" sysid='ref1'><seg id=1>the end</seg></DOC>
<doc sysid="ref2" docid="two"><seg id="1">it ends</seg></doc>
</refset>
"""


def write(folder: Path, name: str, text: str, encoding: str = "utf-8") -> Path:
    path = folder / name
    packers: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".xz": lzma.compress}
    data = text.encode(encoding)
    path.write_bytes(packers[path.suffix](data) if path.suffix in packers else data)
    return path


@pytest.mark.parametrize("name", ["memory.tmx", "memory.tmx.gz", "memory.tmx.xz"])
def test_a_memory_gives_the_pairs_of_two_languages(tmp_path: Path, name: str) -> None:
    memory = TranslationMemory(write(tmp_path, name, MEMORY), "en", "de")
    assert list(memory.pairs()) == [
        Pair("The red boat sails.", "Das rote Boot segelt & wartet.", 6),
        Pair("The wind turns.", "Der Wind dreht.", 13),
    ]
    assert memory.paths == (tmp_path / name,)


@pytest.mark.parametrize(
    ("source", "target", "count"),
    [
        ("en-gb", "de", 1),
        ("EN", "fr", 1),
        ("en-US", "de-AT", 1),
        ("de", "en_GB", 1),
        ("en", "de-de", 0),
        ("e", "de", 0),
    ],
)
def test_a_region_that_is_asked_for_must_be_there(tmp_path: Path, source: str, target: str, count: int) -> None:
    memory = TranslationMemory(write(tmp_path, "memory.tmx", MEMORY), source, target)
    if count:
        assert len(list(memory.pairs())) == count
    else:
        with pytest.raises(DataError, match=f"no translation unit has both {source} and {target}; .* DE, de_AT, en,"):
            list(memory.pairs())


def test_a_memory_in_another_encoding(tmp_path: Path) -> None:
    memory = write(tmp_path, "memory.tmx", MEMORY.replace("UTF-8", "UTF-16"), "utf-16")
    assert len(list(TranslationMemory(memory, "en", "de").pairs())) == 2


def test_a_long_memory_is_read_incrementally(tmp_path: Path) -> None:
    """Over many blocks; pairs are yielded before an error later in the file is reached."""
    unit = '<tu><tuv xml:lang="en"><seg>word {0}</seg></tuv><tuv xml:lang="de"><seg>Wort {0}</seg></tuv></tu>\n'
    text = "<tmx>\n" + "".join(unit.format(number) for number in range(5000))
    pairs = TranslationMemory(write(tmp_path, "memory.tmx", text + "<tmx"), "en", "de").pairs()
    seen = [next(pairs) for _ in range(2000)]
    assert seen == [Pair(f"word {number}", f"Wort {number}", number + 2) for number in range(2000)]
    with pytest.raises(DataError, match=r"memory\.tmx: line 5002: not valid XML"):
        list(pairs)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(*[st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Cn"]))] * 2), min_size=1)
)
def test_any_text_survives_a_memory(pairs: list[tuple[str, str]]) -> None:
    cleaned = [tuple(" ".join(side.split()) for side in pair) for pair in pairs]
    units = "".join(
        f'<tu><tuv xml:lang="aa"><seg>{escape(a)}</seg></tuv><tuv xml:lang="bb"><seg>{escape(b)}</seg></tuv></tu>'
        for a, b in pairs
    )
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), "memory.tmx", f"<tmx>{units}</tmx>")
        assert [(p.source, p.target) for p in TranslationMemory(path, "aa", "bb").pairs()] == cleaned


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "line 2: entity 'a' is not supported"),
        (EXTERNAL, "line 2: entity 'a' is not supported"),
        (UNDECLARED, "line 2: entity 'who' is not supported"),
        ("<tmx>\n<tu>\n</tmx>", "line 3: not valid XML: mismatched tag"),
        ("<tmx>\n<tu>", "line 2: not valid XML: no element found"),
        ("<tmx>\n&nbsp;</tmx>", "line 2: not valid XML: undefined entity"),
        ("", "line 1: not valid XML: no element found"),
        ("plain text", "line 1: not valid XML: syntax error"),
        ('<?xml version="1.0" encoding="GB2312"?><tmx/>', "unsupported encoding (multi-byte"),
        ('<?xml version="1.0" encoding="invented"?><tmx/>', "unsupported encoding (unknown encoding"),
    ],
)
def test_xml_that_is_wrong_or_dangerous_is_refused_by_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, "memory.tmx", text)
    with pytest.raises(DataError) as raised:
        list(TranslationMemory(path, "en", "de").pairs())
    assert str(raised.value).startswith(f"{path}: {message}")


def test_a_missing_memory_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.tmx: no such file"):
        list(TranslationMemory(tmp_path / "none.tmx", "en", "de").pairs())


def test_a_wmt_set_gives_the_references_of_complete_translators(tmp_path: Path) -> None:
    test_set = WmtTestSet(write(tmp_path, "set.xml", WMT))
    sources = ["The tide is low.", "Nobody fishes & nobody sings.", "It rains."]
    references = [
        ["Es ist Ebbe.", "Niemand fischt.", "Es regnet."],
        ["Ebbe.", "Keiner fischt oder singt.", "Es gießt."],
    ]
    assert test_set.references() == references
    assert list(test_set.pairs()) == [
        Pair(s, t, n) for n, (s, t) in enumerate(zip(sources, references[0], strict=True), 1)
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('<seg id="1">Ebbe.</seg>', "", "line 4: reference C has 1 segments, the source 2"),
        (
            '<seg id="1">Es gießt',
            '<seg id="7">Es gießt',
            "line 11: reference C has 1 segments, the source 1, or their ids",
        ),
        ("doc", "text", "no <doc> with <src> and <ref>"),
        ('<seg id="2">Nobody', '<seg id="1">Nobody', "document at line 4: <src> has two segments with id 1"),
        ('<seg id="2">Niemand', '<seg id="1">Niemand', "document at line 4: <ref> has two segments with id 1"),
    ],
)
def test_an_inconsistent_wmt_set_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = write(tmp_path, "set.xml", WMT.replace(old, new))
    with pytest.raises(DataError) as raised:
        WmtTestSet(path).references()
    assert str(raised.value).startswith(f"{path}: {message}")


def test_references_follow_the_segments_of_the_source(tmp_path: Path) -> None:
    swapped = WMT.replace(
        '<seg id="1">Es ist Ebbe.</seg><seg id="2">Niemand fischt.</seg>',
        '<seg id="2">Niemand fischt.</seg><seg id="1">Es ist Ebbe.</seg>',
    )
    assert swapped != WMT
    sets = [WmtTestSet(write(tmp_path, name, text)) for name, text in (("as_it_is.xml", WMT), ("swapped.xml", swapped))]
    assert list(sets[0].pairs()) == list(sets[1].pairs())
    assert sets[0].references() == sets[1].references()


@pytest.mark.parametrize(("translators", "line"), [(["AB", "A", "B"], 4), (["AB", "BC", "CB", "A"], 5), (["", "A"], 2)])
def test_the_document_that_leaves_no_translator_is_named(tmp_path: Path, translators: list[str], line: int) -> None:
    documents = [
        "<doc><src><seg>x</seg></src>"
        + "".join(f'<ref translator="{name}"><seg>{name}</seg></ref>' for name in each)
        + "</doc>\n"
        for each in translators
    ]
    path = write(tmp_path, "set.xml", "<dataset>\n" + "".join(documents) + "</dataset>")
    with pytest.raises(DataError, match=rf"set\.xml: line {line}: no translator has references for every document"):
        WmtTestSet(path).references()


def test_a_wmt_set_without_a_complete_translator_is_refused(tmp_path: Path) -> None:
    text = WMT.replace('translator="A"><p><seg id="1">Es ist', 'translator="D"><p><seg id="1">Es ist')
    path = write(
        tmp_path, "set.xml", text.replace('translator="C"><p><seg id="1">Ebbe', 'translator="E"><p><seg id="1">Ebbe')
    )
    with pytest.raises(DataError, match=r"set\.xml: line 11: no translator has references for every document"):
        WmtTestSet(path).references()


@pytest.mark.parametrize("name", ["set.sgm", "set.SGM", "set.sgml.gz", "set.sgm.xz"])
def test_sgm_files_hold_one_reference_set_per_system(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name, SGM)
    first = ["AT&T & others", "a line that goes on ä&copy", "the end"]
    assert read_references(path) == [first, ["AT and T", "one line", "it ends"]]
    assert list(read_sentences(path)) == first
    other = write(tmp_path, "other.txt", "eins\nzwei\ndrei\n")
    assert [pair.target for pair in ParallelFiles(other, path).pairs()] == first


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<doc>\n<seg id=1>one</seg>\n<seg id=2>two\n<seg id=3>three</seg>", "line 3: <seg> without </seg>"),
        ("<doc>\n<seg id=1>one", "line 2: <seg> without </seg>"),
        ("<doc>\n</doc>", "no <seg> found"),
    ],
)
def test_an_invalid_sgm_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, "set.sgm", text)
    with pytest.raises(DataError) as raised:
        read_references(path)
    assert str(raised.value).startswith(f"{path}: {message}")


def test_text_is_one_set_of_references(tmp_path: Path) -> None:
    path = write(tmp_path, "set.txt", "one\n<seg id=1>two</seg>\n")
    assert read_references(path) == [["one", "<seg id=1>two</seg>"]]
    assert list(read_sentences(path)) == ["one", "<seg id=1>two</seg>"]

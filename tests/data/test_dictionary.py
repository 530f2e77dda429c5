"""Entries of Ding and CC-CEDICT: senses, alternatives, remarks, articles, abbreviations and malformed lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulmt.data.dictionary import all_translations, dictionary_corpus, read_entry
from simulmt.data.transforms import Dropped
from simulmt.errors import DataError


@pytest.mark.parametrize(
    ("line", "pairs"),
    [
        ("Zitronensaft :: lemon juice", [("Zitronensaft", "lemon juice")]),
        # every source alternative, the first target alternative
        ("blank; pur {adj} :: sheer; pure", [("blank", "sheer"), ("pur", "sheer")]),
        # senses correspond; nouns also with their article
        (
            "Spülmaschine {f} | Spülmaschinen {pl} :: dishwasher | dishwashers",
            [
                ("Spülmaschine", "dishwasher"),
                ("die Spülmaschine", "the dishwasher"),
                ("Spülmaschinen", "dishwashers"),
                ("die Spülmaschinen", "the dishwashers"),
            ],
        ),
        # no article with names, and with phrases
        ("Aachener {m} :: Aachen resident", [("Aachener", "Aachen resident")]),
        ("blauer Aal {m} :: blue eel", [("blauer Aal", "blue eel")]),
        # remarks, also with semicolons in them
        ("Kran {m} (Bau; Hafen) [techn.] :: crane <cranes> /C/", [("Kran", "crane"), ("der Kran", "the crane")]),
        # dialect and archaic words
        ("Velo {n} [Schw.]; Fahrrad {n} :: bicycle", [("Fahrrad", "bicycle"), ("das Fahrrad", "the bicycle")]),
        ("rufen :: to ejaculate [dated]; to call", [("rufen", "to call")]),
        # abbreviations
        ("jdm. etw. geben {vt} :: to give sth. to sb.", [("jemandem etwas geben", "to give something to somebody")]),
        # variants within a phrase
        ("ein- / ausräumen; leeren :: to empty", [("leeren", "to empty")]),
        ("leeren :: to load / unload; to empty", [("leeren", "to empty")]),
        # the same pair twice
        ("Ahle {f}; Ahle {f} :: awl", [("Ahle", "awl"), ("die Ahle", "the awl")]),
        # typographic apostrophes
        ("Keine Sorge! :: Don’t worry!", [("Keine Sorge!", "Don't worry!")]),
    ],
)
def test_an_entry_becomes_pairs(line: str, pairs: list[tuple[str, str]]) -> None:
    assert read_entry(line, Path("ding.txt"), 1) == pairs


@pytest.mark.parametrize(
    ("line", "reason"),
    [("Aal | Aale :: eel", "unparallel"), ("(Bau) :: crane", "empty"), ("Kran :: crane / hoist", "empty")],
)
def test_entries_without_a_pair_are_dropped(line: str, reason: str) -> None:
    assert read_entry(line, Path("ding.txt"), 7) == [Dropped(reason, 7)]


@pytest.mark.parametrize("line", ["Aal - eel", "Aal :: eel :: anguille"])
def test_a_line_without_two_sides_is_an_error(line: str) -> None:
    with pytest.raises(DataError, match=r"ding\.txt, line 3: expected SOURCE :: TARGET"):
        read_entry(line, Path("ding.txt"), 3)


def test_a_dictionary_becomes_a_corpus(tmp_path: Path) -> None:
    dictionary = tmp_path / "ding.txt"
    dictionary.write_text("# a comment :: of the authors\n\nAal {m} :: eel\nAal | Aale :: eel\n", encoding="utf-8")
    record = dictionary_corpus(dictionary, tmp_path / "train")
    assert (tmp_path / "train.source").read_text(encoding="utf-8") == "Aal\nder Aal\n"
    assert (tmp_path / "train.target").read_text(encoding="utf-8") == "eel\nthe eel\n"
    assert record["kept"] == 2
    assert record["left"] == {"unparallel": [4]}


CEDICT = """# CC-CEDICT
煙囪 烟囱 [yan1 cong1] /chimney/
熜 熜 [cong1] /chimney (old)/
銀行 银行 [yin2 hang2] /bank; banking house (finance)/CL:家[jia1]/
去掉 去掉 [qu4 diao4] /to get rid of; to remove/to exclude/
囱 囱 [cong1] /variant of 囪|囱[cong1]/
匈牙利 匈牙利 [Xiong1 ya2 li4] /Hungary/
"""


def test_cedict_gives_english_words_with_their_most_frequent_translation(tmp_path: Path) -> None:
    dictionary = tmp_path / "cedict.txt"
    dictionary.write_text(CEDICT, encoding="utf-8")
    record = dictionary_corpus(dictionary, tmp_path / "train")
    sources, targets = ((tmp_path / f"train.{side}").read_text(encoding="utf-8") for side in ("source", "target"))
    pairs = dict(zip(sources.splitlines(), targets.splitlines(), strict=True))
    assert pairs == {
        "chimney": "烟囱",
        "bank": "银行",
        "banking house": "银行",
        "get rid of": "去掉",
        "remove": "去掉",
        "Hungary": "匈牙利",
    }
    assert record["left"] == {"empty": [6]}  # only a variant


def test_all_translations_include_rare_words_and_later_senses(tmp_path: Path) -> None:
    dictionary = tmp_path / "cedict.txt"
    dictionary.write_text(CEDICT, encoding="utf-8")
    found = list(all_translations(dictionary))
    assert {("chimney", "烟囱"), ("chimney", "熜"), ("exclude", "去掉")} <= {*found}
    dictionary.write_text("Kran {m}; Heber {m} | Kräne :: crane; hoist | cranes\n", encoding="utf-8")
    assert {*all_translations(dictionary)} == {
        *((one, other) for one in ("Kran", "Heber") for other in ("crane", "hoist")),
        ("Kräne", "cranes"),
    }


def test_a_malformed_line_of_cedict_is_an_error(tmp_path: Path) -> None:
    dictionary = tmp_path / "cedict.txt"
    dictionary.write_text(CEDICT + "烟 - smoke\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"cedict\.txt, line 8: expected 傳統 简体 \[pin1 yin1\] /sense/"):
        dictionary_corpus(dictionary, tmp_path / "train")


def test_an_empty_dictionary_gives_no_pairs(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("# nothing\n", encoding="utf-8")
    assert dictionary_corpus(tmp_path / "empty.txt", tmp_path / "train")["kept"] == 0

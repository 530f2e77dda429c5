"""Dictionary entries: senses, alternatives, remarks, articles, abbreviations and malformed lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulmt.data.dictionary import dictionary_corpus, read_entry
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

from __future__ import annotations

import math
import random
from itertools import accumulate, compress, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulmt.data.alignment import anticipation_rate, parse_pharaoh, read_alignments, reorder_target
from simulmt.data.synthetic import (
    MAX_WORDS,
    Construction,
    SyntheticPair,
    Word,
    _Phrase,
    _reversed_at,
    _translate,
    generate,
    lexicon,
    write_corpus,
)
from simulmt.errors import ConfigError, DataError

SAMPLE = 800
UNTRANSLATED = {"personal article", "expletive"}
PARTICLES = {"assertion", "person classifier", "thing classifier"}

reorders = st.floats(0, 1)
seeds = st.integers(0, 10_000)


def sample(reorder: float, seed: int = 5, count: int = SAMPLE) -> list[SyntheticPair]:
    return list(generate(count, reorder, seed))


def source_dictionary() -> dict[str, Word]:
    return {word.source: word for words in lexicon().values() for word in words if word.source}


def anticipation(pairs: list[SyntheticPair], k: int) -> float:
    return anticipation_rate((pair.links for pair in pairs), k)


@settings(deadline=None, max_examples=10)
@given(reorders, seeds)
def test_pairs_depend_only_on_reorder_and_seed(reorder: float, seed: int) -> None:
    first = sample(reorder, seed, 20)
    random.seed(seed + 1)
    state = random.getstate()
    assert sample(reorder, seed, 20) == first
    assert random.getstate() == state
    assert sample(reorder, seed, 7) == first[:7]
    assert sample(reorder, seed + 1, 20) != first


@settings(deadline=None, max_examples=10)
@given(reorders, seeds)
def test_reorder_changes_only_the_order_of_target_words(reorder: float, seed: int) -> None:
    for pair, monotone in zip(sample(reorder, seed, 20), sample(0, seed, 20), strict=True):
        assert pair.source == monotone.source
        assert sorted(pair.target.split()) == sorted(monotone.target.split())


def test_generation_is_lazy() -> None:
    assert next(generate(10**15, 1.0, 1)) == sample(1.0, 1, 1)[0]


def test_a_seed_means_the_same_sentence_everywhere() -> None:
    """The kirlu, finvan and farel, of Kangon passes through the dernin."""
    source = "gu kirlu finvan farel kes don Kangon pason bi gu dernin ."
    monotone = "waong haikze kyakyong zengho sheng Kyochai zutsang wuk waong shaikshaing tsang wok ."
    head_final = "waong shaikshaing tsang wuk Kyochai sheng waong zengho kyakyong haikze zutsang wok ."
    assert [(pair.source, pair.target) for pair in sample(0, 8, 1)] == [(source, monotone)]
    assert [(pair.source, pair.target) for pair in sample(1, 8, 1)] == [(source, head_final)]


def word(english: str) -> Word:
    return Word("any", english, (english,))


def test_a_larger_reorder_reverses_more_constructions() -> None:
    """The girl sees the door big of the house, because the dog must sleep under the tree today."""
    big_door = _Phrase(Construction.ATTRIBUTE, (word("door"), word("big")))
    of_house = _Phrase(Construction.ADPOSITION, (word("of"), word("house")))
    door_of_house = _Phrase(Construction.POSSESSION, (big_door, of_house))
    sees = _Phrase(Construction.OBJECT, (word("sees"), door_of_house))
    main = _Phrase(Construction.FIXED, (word("girl"), sees))
    must_sleep = _Phrase(Construction.AUXILIARY, (word("must"), word("sleep")))
    dog = _Phrase(Construction.FIXED, (word("dog"), must_sleep))
    under_tree = _Phrase(Construction.ADPOSITION, (word("under"), word("tree")))
    today = _Phrase(Construction.TIME, (_Phrase(Construction.SETTING, (dog, under_tree)), word("today")))
    because = _Phrase(Construction.MARKER, (word("because"), today))
    sentence = _Phrase(Construction.SUBORDINATION, (main, word(","), because))
    expected = {
        0.0: "girl sees door big of house , because dog must sleep under tree today",
        0.1: "girl sees big door of house , because dog must sleep under tree today",
        0.2: "girl sees big door house of , because dog must sleep tree under today",
        0.3: "girl sees house of big door , because dog must sleep tree under today",
        0.4: "girl sees house of big door , because tree under dog must sleep today",
        0.6: "girl house of big door sees , because tree under dog must sleep today",
        0.7: "girl house of big door sees , because tree under dog sleep must today",
        0.75: "girl house of big door sees , because today tree under dog sleep must",
        0.8: "because today tree under dog sleep must , girl house of big door sees",
        1.0: "today tree under dog sleep must because , girl house of big door sees",
    }
    for reorder, target in expected.items():
        pair = _translate(sentence, _reversed_at(reorder))
        assert pair.source == expected[0.0]
        assert pair.target == target


@pytest.mark.parametrize("construction", [c for c in Construction if c is not Construction.FIXED])
def test_every_construction_moves_something(construction: Construction) -> None:
    just_below = math.nextafter(construction.value, 0)
    before, after = sample(just_below, count=100), sample(construction.value, count=100)
    assert any(a.target != b.target for a, b in zip(before, after, strict=True))


def test_reorder_zero_is_monotone() -> None:
    pairs = sample(0)
    for pair in pairs:
        assert reorder_target(pair.target.split(), pair.links) == pair.target.split()
        in_target_order = sorted(pair.links, key=lambda link: link[1])
        assert in_target_order == list(pair.links)
    # What is left comes from untranslated words, which let the target run ahead of its source.
    assert anticipation(pairs, 1) < 0.18
    assert anticipation(pairs, 3) < 0.01


def test_reorder_one_is_head_final() -> None:
    """Markers of a clause follow its verb, and adpositions follow a noun."""
    verbs = {"transitive verb", "intransitive verb", "copula", "auxiliary", "passive"}
    nouns = {"person", "thing", "name"}
    expected_before = dict.fromkeys(("relative", "complementiser", "subordinator", "question"), verbs)
    expected_before |= dict.fromkeys(("preposition", "linker", "agent marker"), nouns)
    dictionary = source_dictionary()
    met = set()
    for pair in sample(1):
        source = pair.source.split()
        kind_at = {j: dictionary[source[i - 1]].kind for i, j in pair.links}
        for j, kind in kind_at.items():
            if kind in expected_before:
                assert kind_at[j - 1] in expected_before[kind], pair
                met.add(kind)
    assert met == set(expected_before)


def test_anticipation_grows_with_reorder() -> None:
    samples = [sample(reorder) for reorder in (0, 0.25, 0.5, 0.75, 1)]
    for k in (1, 3, 5):
        rates = [anticipation(pairs, k) for pairs in samples]
        assert all(low < high for low, high in pairwise(rates)), (k, rates)


def test_anticipation_is_large_at_reorder_one() -> None:
    pairs = sample(1)
    assert anticipation(pairs, 1) > 0.37
    assert anticipation(pairs, 3) > 0.27
    assert anticipation(pairs, 9) > 0.10


@pytest.mark.parametrize("reorder", [0, 0.5, 1])
def test_links_join_each_word_to_its_translation(reorder: float) -> None:
    dictionary = source_dictionary()
    for pair in sample(reorder):
        source, target = pair.source.split(), pair.target.split()
        kinds = ["", *(dictionary[w].kind for w in source)]
        for i, w in enumerate(source, start=1):
            entry = dictionary[w]
            linked = tuple(target[j - 1] for position, j in pair.links if position == i)
            assert linked == entry.after.get(kinds[i - 1], entry.target)
            assert bool(linked) == (entry.kind not in UNTRANSLATED)


@pytest.mark.parametrize("reorder", [0, 0.5, 1])
def test_only_particles_are_unaligned_in_the_target(reorder: float) -> None:
    particles = {lexicon()[kind][0].target[0] for kind in PARTICLES}
    for pair in sample(reorder):
        aligned = {j for _, j in pair.links}
        for j, w in enumerate(pair.target.split(), start=1):
            assert (j in aligned) != (w in particles)


def test_both_senses_of_ambiguous_words_occur() -> None:
    target_words = {w for pair in sample(1, count=4000) for w in pair.target.split()}
    ambiguous = [w for words in lexicon().values() for w in words if w.after]
    senses = [form for w in ambiguous for forms in (w.target, *w.after.values()) for form in forms]
    assert len(ambiguous) >= 10
    assert sum(form in target_words for form in senses) > 0.9 * len(senses)


@pytest.mark.parametrize("reorder", [0.5, 0.8, 1])
def test_the_grammar_is_unambiguous(reorder: float) -> None:
    """The order follows from the kinds of the source words alone, so no sentence has two translations.

    Whatever a noun phrase is made of, it moves as one; so each counts as one item, to make patterns recur.
    """
    within_noun_phrase = {"person", "thing", "name", "adjective"}
    any_determiner = dict.fromkeys(("article", "number", "personal article"), "determiner")
    kind_of = {w: any_determiner.get(entry.kind, entry.kind) for w, entry in source_dictionary().items()}
    order_of: dict[tuple[str, ...], list[int]] = {}
    for pair in sample(reorder, count=5000):
        kinds = [kind_of[w] for w in pair.source.split()]
        starts_item = [int(kind not in within_noun_phrase) for kind in kinds]
        item_of = list(accumulate(starts_item))
        in_target_order = sorted(pair.links, key=lambda link: link[1])
        order = list(dict.fromkeys(item_of[i - 1] for i, _ in in_target_order))
        pattern = tuple(compress(kinds, starts_item))
        assert order_of.setdefault(pattern, order) == order, pair.source
    assert len(order_of) < 3500  # patterns do recur, so the assertion above can fail


def test_sentences_are_of_all_lengths_and_end_in_punctuation() -> None:
    pairs = sample(1, count=2000)
    lengths = {len(pair.source.split()) for pair in pairs}
    assert lengths == set(range(4, MAX_WORDS + 1))
    for pair in pairs:
        assert pair.source.split()[-1] in {".", "?"}
        assert pair.target.split()[-1] == pair.source.split()[-1]


def test_vocabularies_have_hundreds_of_unambiguously_spelt_words() -> None:
    entries = [w for words in lexicon().values() for w in words]
    source = [w.source for w in entries if w.source]
    target = [form for w in entries for forms in (w.target, *w.after.values()) for form in forms]
    assert len(source) == len(set(source))
    assert len(target) == len(set(target))
    assert 300 < len(source) < 900
    assert not (set(source) & set(target)) - {",", ".", "?"}


@pytest.mark.parametrize("reorder", [-0.01, 1.01, math.nan])
def test_a_reorder_setting_outside_zero_to_one_is_refused(tmp_path: Path, reorder: float) -> None:
    with pytest.raises(ConfigError, match="reorder = "):
        generate(1, reorder, 1)
    with pytest.raises(ConfigError, match="reorder = "):
        write_corpus(tmp_path / "corpus", reorder)
    assert not (tmp_path / "corpus").exists()


def test_negative_counts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="count = -1"):
        generate(-1, 0.5, 1)
    with pytest.raises(ConfigError, match="dev = -2"):
        write_corpus(tmp_path / "corpus", 0.5, dev=-2)
    assert not (tmp_path / "corpus").exists()


def read_split(directory: Path, name: str) -> list[SyntheticPair]:
    sides = ((directory / f"{name}.{side}").read_text().splitlines() for side in ("source", "target"))
    links = read_alignments(directory / f"{name}.links", parse_pharaoh)
    rows = zip(*sides, links, strict=True)
    return [SyntheticPair(source, target, tuple(sorted(row))) for source, target, row in rows]


def test_write_corpus_writes_disjoint_splits(tmp_path: Path) -> None:
    write_corpus(tmp_path / "new" / "corpus", 1.0, train=500, dev=40, test=30, seed=37)
    splits = {name: read_split(tmp_path / "new" / "corpus", name) for name in ("train", "dev", "test")}
    assert {name: len(pairs) for name, pairs in splits.items()} == {"train": 500, "dev": 40, "test": 30}
    sources = [pair.source for pairs in splits.values() for pair in pairs]
    assert len(set(sources)) == len(sources)
    generated = sample(1.0, 37, 600)
    assert len({pair.source for pair in generated}) < 600  # this seed does repeat a sentence
    assert {pair for pairs in splits.values() for pair in pairs} <= set(generated)


def test_existing_files_are_overwritten_only_on_request(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("what else lies there does not matter")
    write_corpus(tmp_path, 0.5, train=3, dev=2, test=1, seed=2)
    before = (tmp_path / "train.source").read_text()
    with pytest.raises(DataError, match=r"test.source: already exists; choose another .* --overwrite"):
        write_corpus(tmp_path, 0.5, train=3, dev=2, test=1, seed=3)
    assert (tmp_path / "train.source").read_text() == before
    write_corpus(tmp_path, 0.5, train=3, dev=2, test=1, seed=3, overwrite=True)
    assert (tmp_path / "train.source").read_text() != before


def test_a_place_that_cannot_be_written_to_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "corpus").write_text("a file in place of the directory")
    with pytest.raises(DataError, match="corpus: cannot be written: File exists"):
        write_corpus(tmp_path / "corpus", 0.5, train=1, dev=1, test=1)


def test_development_and_test_sets_do_not_depend_on_the_size_of_train(tmp_path: Path) -> None:
    write_corpus(tmp_path / "small", 0.5, train=0, dev=20, test=20, seed=2)
    write_corpus(tmp_path / "large", 0.5, train=50, dev=20, test=20, seed=2)
    for name in ("dev", "test"):
        assert read_split(tmp_path / "small", name) == read_split(tmp_path / "large", name)
    assert read_split(tmp_path / "small", "train") == []

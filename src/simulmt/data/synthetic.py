"""A synthetic language pair with adjustable reordering: the toy task.

The source language is head-initial: verbs come before objects, nouns before adjectives and relative clauses,
prepositions before nouns. At `reorder` 0 the target language does the same; as `reorder` grows, one construction after
another becomes head-final, as in Japanese, until at 1 all of them are. In English words:

    source and reorder 0    the girl sees the house big of the uncle today
    reorder 1               today the girl the uncle of the big house sees

A sentence is a tree of phrases, and the target reverses the parts of some kinds of phrase. The grammar is unambiguous,
so a source sentence has exactly one translation at each setting. A model has to learn the dictionary and the order.

The dictionary is nearly word for word. Some words have two target words; two source words are not translated; the
target adds particles, one at the end of statements and one of two between a number and its noun; and a few words are
ambiguous without the word to their left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, unique
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple, TextIO

from simulmt.data.alignment import Link, format_pharaoh
from simulmt.data.corpus import wrap_write_errors
from simulmt.errors import ConfigError, DataError

MAX_WORDS = 25  # in a source sentence, punctuation included; the shortest have 4


@dataclass(frozen=True)
class SyntheticPair:
    """A sentence, its translation, and 1-based (source, target) links between their words."""

    source: str
    target: str
    links: tuple[Link, ...]


def generate(count: int, reorder: float, seed: int) -> Iterator[SyntheticPair]:
    """Yield `count` random pairs; source sentences depend on the seed only, not on `reorder`."""
    _require_count("count", count)
    return islice(_pairs(_reversed_at(reorder), seed), count)


def write_corpus(
    directory: Path,
    reorder: float,
    train: int = 20_000,
    dev: int = 500,
    test: int = 500,
    seed: int = 1,
    overwrite: bool = False,
) -> None:
    """Write train, dev and test, each as NAME.source, NAME.target and NAME.links (Pharaoh format).

    Sentences are unique. For a given seed, dev and test do not depend on the size of train.
    """
    splits = {"test": test, "dev": dev, "train": train}
    for name, count in splits.items():
        _require_count(name, count)
    pairs = _distinct(_pairs(_reversed_at(reorder), seed))
    if not overwrite:
        _refuse_to_overwrite(directory, splits)
    with wrap_write_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for name, count in splits.items():
            _write_split(directory, name, islice(pairs, count))


def _require_count(name: str, count: int) -> None:
    if count < 0:
        raise ConfigError(f"{name} = {count}: expected a number of sentences, 0 or more")


def _refuse_to_overwrite(directory: Path, names: Iterable[str]) -> None:
    for path in (directory / f"{name}.{side}" for name in names for side in ("source", "target", "links")):
        if path.exists():
            raise DataError(f"{path}: already exists; choose another directory or replace it with --overwrite")


def _pairs(reversed_kinds: frozenset[Construction], seed: int) -> Iterator[SyntheticPair]:
    generator = _SentenceGenerator(Random(seed))
    while True:
        pair = _translate(generator.sentence(), reversed_kinds)
        if len(pair.source.split()) <= MAX_WORDS:
            yield pair


def _distinct(pairs: Iterator[SyntheticPair]) -> Iterator[SyntheticPair]:
    seen = set()
    for pair in pairs:
        if pair.source not in seen:
            seen.add(pair.source)
            yield pair


def _write_split(directory: Path, name: str, pairs: Iterator[SyntheticPair]) -> None:
    def create(side: str) -> TextIO:
        return (directory / f"{name}.{side}").open("w", encoding="utf-8", newline="\n")

    with create("source") as source, create("target") as target, create("links") as links:
        for pair in pairs:
            source.write(pair.source + "\n")
            target.write(pair.target + "\n")
            links.write(format_pharaoh(pair.links) + "\n")


# --- Trees and their target order --------------------------------------------------------------------------


@unique
class Construction(Enum):
    """A kind of phrase; its value is the `reorder` setting from which the target reverses it."""

    ATTRIBUTE = 0.1  # house big -> big house
    ADPOSITION = 0.2  # under table -> table under
    POSSESSION = 0.3  # door of house -> of house door
    ADVERBIAL = 0.35  # sings loudly -> loudly sings
    SETTING = 0.4  # she sings under table -> under table she sings
    RELATIVE = 0.5  # dog who sleeps -> who sleeps dog
    OBJECT = 0.6  # sees dog -> dog sees
    AUXILIARY = 0.7  # must sleep -> sleep must
    TIME = 0.75  # it rains today -> today it rains
    SUBORDINATION = 0.8  # she stays , because it rains -> because it rains , she stays
    COMPLEMENT = 0.9  # says that it rains -> that it rains says
    MARKER = 1.0  # because it rains -> it rains because
    FIXED = 2.0  # above 1: never reversed


@dataclass(frozen=True, slots=True)
class Word:
    """A dictionary entry; target particles have no source text, untranslated words no target words.

    `after` holds the senses of an ambiguous word: its translation after a source word of the given kind.
    """

    kind: str
    source: str
    target: tuple[str, ...]
    after: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class _Phrase(NamedTuple):
    construction: Construction
    parts: tuple[Word | _Phrase, ...]


_Part = Word | _Phrase


def _reversed_at(reorder: float) -> frozenset[Construction]:
    if not 0 <= reorder <= 1:
        raise ConfigError(f"reorder = {reorder}: expected a number from 0 (source order) to 1 (head-final)")
    return frozenset(construction for construction in Construction if construction.value <= reorder)


def _translate(sentence: _Part, reversed_kinds: frozenset[Construction]) -> SyntheticPair:
    words: list[Word] = []
    order = _flatten(sentence, reversed_kinds, words)
    source: list[str] = []
    positions, translations = [], []
    left = ""
    for word in words:
        translations.append(word.after.get(left, word.target))
        if word.source:
            source.append(word.source)
            left = word.kind
        positions.append(len(source))
    target: list[str] = []
    links = []
    for index in order:
        for form in translations[index]:
            target.append(form)
            if words[index].source:
                links.append((positions[index], len(target)))
    return SyntheticPair(" ".join(source), " ".join(target), tuple(sorted(links)))


def _flatten(part: _Part, reversed_kinds: frozenset[Construction], words: list[Word]) -> list[int]:
    """Append the words of `part` to `words` in source order; return their indices in target order."""
    if isinstance(part, Word):
        words.append(part)
        return [len(words) - 1]
    orders = [_flatten(child, reversed_kinds, words) for child in part.parts]
    if part.construction in reversed_kinds:
        orders.reverse()
    return [index for order in orders for index in order]


# --- The grammar of the source language --------------------------------------------------------------------


class _SentenceGenerator:
    """Generates random sentences as trees whose leaves, from left to right, are the source words.

    To keep sentences unambiguous, a noun phrase takes at most one kind of modifier, and relative clauses have no
    adverbials: whatever follows one belongs to the enclosing clause.
    """

    def __init__(self, random: Random) -> None:
        self._random = random.random
        self._lexicon = lexicon()

    def sentence(self) -> _Part:
        shape = self._random()
        if shape < 0.1:
            question = _Phrase(Construction.MARKER, (self._word("question"), self._clause()))
            return _Phrase(Construction.FIXED, (question, self._word("question mark")))
        if shape < 0.35:
            statement = self._clause()
        elif shape < 0.5:
            statement = self._report()
        elif shape < 0.9:
            statement = self._subordination()
        else:
            statement = self._coordination()
        return _Phrase(Construction.FIXED, (statement, self._word("assertion"), self._word("full stop")))

    def _report(self) -> _Part:
        """Generate a clause such as "the uncle says that it rains"."""
        content = _Phrase(Construction.MARKER, (self._word("complementiser"), self._clause()))
        said = _Phrase(Construction.COMPLEMENT, (self._word("speech verb"), content))
        return _Phrase(Construction.FIXED, (self._simple_noun_phrase(), said))

    def _subordination(self) -> _Part:
        """Generate a clause such as "the girl stays, because it rains"."""
        reason = _Phrase(Construction.MARKER, (self._word("subordinator"), self._clause()))
        return _Phrase(Construction.SUBORDINATION, (self._clause(), self._word("comma"), reason))

    def _coordination(self) -> _Part:
        """Generate a clause such as "the girl stays, but the uncle leaves"."""
        first, second = self._clause(), self._clause()
        return _Phrase(Construction.FIXED, (first, self._word("comma"), self._word("clause conjunction"), second))

    def _clause(self) -> _Part:
        """Generate a clause such as "the girl sings behind the house today" or "today the girl sings"."""
        if self._chance(0.08):
            clause = self._existential()
        else:
            clause = _Phrase(Construction.FIXED, (self._noun_phrase(), self._predicate()))
        while self._chance(0.4):
            place = _Phrase(Construction.ADPOSITION, (self._word("preposition"), self._noun_phrase()))
            clause = _Phrase(Construction.SETTING, (clause, place))
        if self._chance(0.2):
            return _Phrase(Construction.TIME, (clause, self._word("time")))
        if self._chance(0.1):
            return _Phrase(Construction.FIXED, (self._word("time"), clause))
        return clause

    def _existential(self) -> _Part:
        """Generate a clause such as "there is a house"."""
        existence = _Phrase(Construction.OBJECT, (self._word("copula"), self._noun_phrase()))
        return _Phrase(Construction.FIXED, (self._word("expletive"), existence))

    def _predicate(self) -> _Part:
        """Generate a predicate such as "must read the letter loudly"; the auxiliary governs all that follows."""
        shape = self._random()
        if shape < 0.1:
            return self._passive()
        predicate: _Part
        if shape < 0.2:
            predicate = _Phrase(Construction.OBJECT, (self._word("copula"), self._word("adjective")))
        elif shape < 0.35:
            predicate = self._word("intransitive verb")
        else:
            predicate = _Phrase(Construction.OBJECT, (self._word("transitive verb"), self._noun_phrase()))
        if self._chance(0.25):
            predicate = _Phrase(Construction.ADVERBIAL, (predicate, self._word("adverb")))
        if self._chance(0.2):
            predicate = _Phrase(Construction.AUXILIARY, (self._word("auxiliary"), predicate))
        return predicate

    def _passive(self) -> _Part:
        """Generate the predicate of a passive clause such as "is written by the girl"."""
        agent = _Phrase(Construction.ADPOSITION, (self._word("agent marker"), self._simple_noun_phrase()))
        event = _Phrase(Construction.ADVERBIAL, (self._word("transitive verb"), agent))
        return _Phrase(Construction.AUXILIARY, (self._word("passive"), event))

    def _noun_phrase(self) -> _Part:
        head = self._simple_noun_phrase()
        shape = self._random()
        if shape < 0.2:
            owner = _Phrase(Construction.ADPOSITION, (self._word("linker"), self._simple_noun_phrase()))
            return _Phrase(Construction.POSSESSION, (head, owner))
        if shape < 0.35:
            description = _Phrase(Construction.MARKER, (self._word("relative"), self._relative_clause()))
            return _Phrase(Construction.RELATIVE, (head, description))
        if shape < 0.42:
            other = self._simple_noun_phrase()
            return _Phrase(Construction.FIXED, (head, self._word("noun conjunction"), other))
        return head

    def _relative_clause(self) -> _Part:
        """Generate a relative clause: who sleeps, who sees the dog, whom the dog sees."""
        if self._chance(0.2):
            return self._word("intransitive verb")
        verb, other = self._word("transitive verb"), self._simple_noun_phrase()
        if self._chance(0.5):
            return _Phrase(Construction.OBJECT, (verb, other))
        return _Phrase(Construction.FIXED, (other, verb))

    def _simple_noun_phrase(self) -> _Part:
        """Generate a noun phrase without modifiers: the Anna, that house big, three dogs."""
        if self._chance(0.1):
            return _Phrase(Construction.FIXED, (self._word("personal article"), self._word("name")))
        kind = "person" if self._chance(0.4) else "thing"
        noun: _Part = self._word(kind)
        while self._chance(0.25):
            noun = _Phrase(Construction.ATTRIBUTE, (noun, self._word("adjective")))
        if self._chance(0.2):
            counted = (self._word("number"), self._word(f"{kind} classifier"), noun)
            return _Phrase(Construction.FIXED, counted)
        return _Phrase(Construction.FIXED, (self._word("article"), noun))

    def _word(self, kind: str) -> Word:
        words = self._lexicon[kind]
        return words[int(self._random() * len(words))]

    def _chance(self, probability: float) -> bool:
        return self._random() < probability


# --- The dictionary ----------------------------------------------------------------------------------------


class _Sounds(NamedTuple):
    onsets: Sequence[str]
    vowels: Sequence[str]
    codas: Sequence[str]


_SOURCE_SOUNDS = _Sounds("bdfgklmnprstv", "aeiou", ("", "", "l", "n", "r", "s"))
_TARGET_SOUNDS = _Sounds(
    ("ch", "h", "j", "ky", "my", "ny", "sh", "ts", "w", "y", "z"),
    ("a", "ai", "ao", "e", "i", "o", "u"),
    ("", "", "k", "ng"),
)

_CONTENT_WORDS = {
    "person": 60, "thing": 120, "name": 40, "transitive verb": 70, "intransitive verb": 30, "speech verb": 8,
    "adjective": 60, "adverb": 24, "time": 12, "number": 10,
}  # fmt: skip
_FUNCTION_WORDS = {
    "article": 4, "preposition": 12, "linker": 3, "agent marker": 1, "copula": 1, "auxiliary": 5, "passive": 1,
    "relative": 1, "complementiser": 1, "subordinator": 6, "clause conjunction": 3, "noun conjunction": 2,
    "question": 1,
}  # fmt: skip
_UNTRANSLATED = ("personal article", "expletive")
_PARTICLES = ("assertion", "person classifier", "thing classifier")
_PUNCTUATION = {"comma": ",", "full stop": ".", "question mark": "?"}


@cache
def lexicon() -> Mapping[str, tuple[Word, ...]]:
    """Return the words of each kind; deterministic."""
    random = Random(3)
    source, target = _WordGenerator(random, _SOURCE_SOUNDS), _WordGenerator(random, _TARGET_SOUNDS)
    words: dict[str, tuple[Word, ...]] = {}
    for kind, count in _CONTENT_WORDS.items():
        words[kind] = tuple(_content_word(kind, number, source, target) for number in range(count))
    for kind, count in _FUNCTION_WORDS.items():
        words[kind] = tuple(Word(kind, source.generate_word(1), (target.generate_word(1),)) for _ in range(count))
    words |= {kind: (Word(kind, source.generate_word(1), ()),) for kind in _UNTRANSLATED}
    words |= {kind: (Word(kind, "", (target.generate_word(1),)),) for kind in _PARTICLES}
    words |= {kind: (Word(kind, mark, (mark,)),) for kind, mark in _PUNCTUATION.items()}
    return words


def _content_word(kind: str, number: int, source: _WordGenerator, target: _WordGenerator) -> Word:
    """Make a word with one target word, or two for every eighth; some adjectives and things have a second sense."""
    if kind == "name":
        return Word(kind, source.generate_word(2).capitalize(), (target.generate_word(2).capitalize(),))
    after = {}
    if kind == "adjective" and number % 6 == 0:
        after["person"] = (target.generate_word(2),)  # a heavy stone, but a heavy uncle
    if kind == "thing" and number % 12 == 0:
        after["number"] = (target.generate_word(2),)  # the glass on the table, but three glasses of water
    forms = (target.generate_word(2), target.generate_word(1)) if number % 8 == 5 else (target.generate_word(2),)
    return Word(kind, source.generate_word(2), forms, after)


class _WordGenerator:
    """Generates unique words from a language's syllables."""

    def __init__(self, random: Random, sounds: _Sounds) -> None:
        self._random = random
        self._sounds = sounds
        self._taken: set[str] = set()

    def generate_word(self, syllables: int) -> str:
        while (word := "".join(self._syllable() for _ in range(syllables))) in self._taken:
            pass
        self._taken.add(word)
        return word

    def _syllable(self) -> str:
        return "".join(sounds[int(self._random.random() * len(sounds))] for sounds in self._sounds)

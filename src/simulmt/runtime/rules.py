"""Decoding rules: each suppresses one kind of error, and can be switched off separately.

    rule                  suppresses               works on             target language
    repeated_symbol       "the the", 的的          scores (CTC)         any
    restarted_noun        "Good Mor morning"       scores (CTC)         English, from German
    unknown_word          "Elliison"               scores (CTC)         any, for words between spaces
    early_full_stop       我丢了护照。在巴黎       scores (transducer)  any, for full-width punctuation
    doubled_punctuation   是的，。                 text                 any

CTC predicts the symbols of neighbouring frames independently, so both may write the same word, or pieces of different
words. A transducer is conditioned on its output and needs none of the rules for CTC.

A rule on the scores of CTC is a `LogitFilter`. It penalises symbols instead of banning them: some words are repeated,
and some are new.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np

from simulmt.config import require
from simulmt.text import BLANK, END, SPACE, SPECIAL_SYMBOLS, Tokenizer
from simulmt.text.words import COMBINING, HAN, LETTER, RARE_HAN, SENTENCE_ENDS

Scores = np.ndarray[Any, np.dtype[Any]]

# Without kana: many Japanese words have the same one twice in a row.
_IDEOGRAPH = re.compile(f"[{HAN}{RARE_HAN}]")
# Words of scripts that put spaces between them, with apostrophes inside; not Thai, Chinese and the like.
_WORD = re.compile(f"{LETTER}(?:{LETTER}|[{COMBINING}]|')*")
_POSSESSIVE = re.compile("'s?$")

_CLAUSE = frozenset(",;:，、；：")
_MARKS = _CLAUSE | frozenset(".!?。！？")
_CHINESE_CLAUSE = frozenset("，、；：")
_NO_CLAUSE_AFTER = _CHINESE_CLAUSE | frozenset("。！？")  # unlike ".", which may end an abbreviation
_FULL_STOPS = frozenset("。！？")  # full-width only: "." may also be a decimal point
_CLOSING = dict(zip("“‘《（「『【", "”’》）」』】", strict=True))  # not "()", which follow the names of functions

SCORE_RULES = ("repeated_symbol", "restarted_noun", "unknown_word")  # each a `LogitFilter`
MIN_COUNT = 5  # occurrences in the training text that make a word known
TOP = 32  # symbols scored first; the best is nearly always among them


@dataclass(frozen=True)
class RulesConfig:
    """Which rules are on: the penalty of each `LogitFilter` (0 is off), and a switch for each other rule."""

    repeated_symbol: float = 0.0
    restarted_noun: float = 0.0
    unknown_word: float = 0.0
    doubled_punctuation: bool = False
    early_full_stop: bool = False

    def __post_init__(self) -> None:
        for name in SCORE_RULES:
            require(0 <= getattr(self, name) < math.inf, f"{name} must be 0 or more, got {getattr(self, name)}")

    @property
    def active(self) -> list[str]:
        """Names of the active rules."""
        return [field.name for field in fields(self) if getattr(self, field.name)]

    @property
    def on_scores(self) -> list[str]:
        """Names of the active rules on the scores of CTC."""
        return [name for name in SCORE_RULES if getattr(self, name)]

    def without(self, *names: str) -> RulesConfig:
        """Return these settings with some rules switched off."""
        off: dict[str, Any] = {field.name: field.default for field in fields(self)}
        for name in names:
            require(name in off, f"{name}: no such rule; choose from {', '.join(off)}")
        return replace(self, **{name: off[name] for name in names})

    def check_language(self, target: str) -> None:
        """Raise ConfigError if a rule is on that is not for this target language."""
        allowed = target == "en" or not self.restarted_noun
        require(allowed, f"restarted_noun is a rule for target language en, not {target}; set it to 0")

    def text_filter(self) -> DoubledPunctuation | None:
        """Return a filter for the text of one sentence; None if there is nothing to filter."""
        return DoubledPunctuation() if self.doubled_punctuation else None

    def filter_text(self, text: str) -> str:
        """Filter a whole sentence at once."""
        text_filter = self.text_filter()
        return text if text_filter is None else text_filter.push(text) + text_filter.finish()


class Context(NamedTuple):
    """The output context that the rules depend on."""

    last: int = BLANK  # last symbol written; blank at the start
    word: str = ""  # the unfinished word it belongs to, case-folded
    is_capitalized: bool = False  # whether that word has a capital and directly follows another word


class SourcePrefix:
    """The source tokens visible to a frame."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = tokens
        self._words: list[str] | None = None

    def words(self, texts: Sequence[str]) -> list[str]:
        """Return its words, case-folded, given the text of each piece; computed once."""
        if self._words is None:
            self._words = folded_words("".join(texts[token] for token in self.tokens))
        return self._words


class PieceTexts:
    """The text of each piece of a vocabulary, as written and case-folded."""

    def __init__(self, pieces: Sequence[str]) -> None:
        written = (piece.replace(SPACE, " ") for piece in pieces[len(SPECIAL_SYMBOLS) :])
        self.texts = [*[""] * len(SPECIAL_SYMBOLS), *written]

    @cached_property
    def folded(self) -> list[str]:
        return [_fold(text) for text in self.texts]


class LogitFilter(ABC):
    """Lowers the scores of unwanted symbols.

    Unlike whisper's, it is applied to single symbols, since only the best few of a large vocabulary matter.
    """

    def __init__(self, penalty: float, target: PieceTexts) -> None:
        self.penalty = penalty
        self.target = target

    @abstractmethod
    def applies(self, symbol: int, context: Context, source: SourcePrefix) -> bool:
        """Return whether writing this symbol next is penalised."""


class RepeatedSymbol(LogitFilter):
    """Penalises the last symbol, if it is more than a letter or a number, and the ideograph that was written last."""

    def applies(self, symbol: int, context: Context, source: SourcePrefix) -> bool:  # noqa: ARG002 - independent of the source
        text, last = self.target.texts[symbol].strip(), self.target.texts[context.last]
        starts_with_ideograph = _IDEOGRAPH.match(text) is not None
        if symbol == context.last and (starts_with_ideograph or sum(map(str.isalpha, text)) > 1):
            return True
        return starts_with_ideograph and text[0] == last[-1:]


class RestartedNoun(LogitFilter):
    """Penalises starting a capitalised word again in lower case: "Good Mor morning", for "Guten Morgen".

    German capitalises nouns, and a model that copies a noun may correct itself in the next frame.
    """

    def applies(self, symbol: int, context: Context, source: SourcePrefix) -> bool:  # noqa: ARG002 - independent of the source
        if not context.is_capitalized or context.word == "i":  # the English pronoun is always capitalised
            return False
        text, start = self.target.texts[symbol], f" {context.word}"
        return text[1:2].islower() and len(text) > len(start) and self.target.folded[symbol].startswith(start)


class UnknownWord(LogitFilter):
    """Penalises symbols after which a word is no longer a prefix of any word in the lexicon or the source read so far.

    A word that is already unknown is not penalised again. Any word may have an English possessive ending, and names
    from the source may follow an elided article ("d'Artagnan").
    """

    def __init__(self, penalty: float, target: PieceTexts, source: PieceTexts, lexicon: Sequence[str]) -> None:
        super().__init__(penalty, target)
        self._source = source
        self._lexicon = lexicon  # sorted

    def applies(self, symbol: int, context: Context, source: SourcePrefix) -> bool:
        word = context.word
        for match in _WORD.finditer(word + self.target.folded[symbol]):
            if match.end() > len(word):  # the first word that the symbol adds to
                continues = bool(word) and match.start() == 0
                was_unknown = continues and not self._is_prefix(word, source)
                return not was_unknown and not self._is_prefix(match.group(), source)
        return False

    def _is_prefix(self, text: str, source: SourcePrefix) -> bool:
        """Return whether this is a prefix of a known word or of a source word."""
        stem = _POSSESSIVE.sub("", text)
        if not stem or stem[0].isdigit() or self._is_in_lexicon(stem):
            return True
        name = stem.rpartition("'")[2]
        copied = (stem, name) if len(name) > 1 else (stem,)
        return any(word.startswith(copied) for word in source.words(self._source.texts))

    def _is_in_lexicon(self, prefix: str) -> bool:
        index = bisect_left(self._lexicon, prefix)
        return index < len(self._lexicon) and self._lexicon[index].startswith(prefix)


class DecodingRules:
    """The decoding rules of a model, applied to the scores of its frames; empty by default."""

    def __init__(
        self,
        config: RulesConfig | None = None,
        pieces: Sequence[str] = (),
        source_pieces: Sequence[str] = (),
        lexicon: Sequence[str] = (),
    ) -> None:
        self.config = config or RulesConfig()
        self._target = PieceTexts(pieces)
        filters = (
            RepeatedSymbol(self.config.repeated_symbol, self._target),
            RestartedNoun(self.config.restarted_noun, self._target),
            UnknownWord(self.config.unknown_word, self._target, PieceTexts(source_pieces), lexicon),
        )
        self.filters: list[LogitFilter] = [each for each in filters if each.penalty]
        self._needs_words = bool(self.config.restarted_noun or self.config.unknown_word)

    @classmethod
    def of(cls, config: RulesConfig, source: Tokenizer, target: Tokenizer, lexicon: Sequence[str] = ()) -> Self:
        """Return the rules of a model with these vocabularies; `lexicon` holds known words, sorted."""
        return cls(config, target.pieces, source.pieces, lexicon) if config.active else cls()

    def extend(self, context: Context, symbol: int) -> Context:
        """Return the context once a symbol has been written."""
        if not self._needs_words:
            return Context(symbol)
        text = context.word + self._target.folded[symbol]
        words = _WORD.findall(text)
        word = words[-1] if words and text.endswith(words[-1]) else ""
        is_capitalized = context.is_capitalized
        if self._target.texts[symbol].startswith(" "):
            is_capitalized = self._target.texts[symbol][1:2].isupper() and context.word != ""
        return Context(symbol, word, is_capitalized and word != "")

    def penalty(self, symbol: int, context: Context, source: SourcePrefix) -> float:
        """Return the sum of the penalties on a symbol."""
        return sum((each.penalty for each in self.filters if each.applies(symbol, context, source)), 0.0)

    def choose(
        self,
        symbols: Iterable[int],
        scores: Iterable[Scores],
        sources: Iterable[SourcePrefix],
        previous: int,
        context: Context,
    ) -> list[int]:
        """Return the best symbol of each frame, given its best without rules, all scores [V] and the visible source.

        `previous` is the symbol of the previous frame; repeating it writes nothing, so it is not penalised.
        """
        chosen = []
        for symbol, frame, source in zip(symbols, scores, sources, strict=True):
            if symbol not in (BLANK, previous) and self.penalty(symbol, context, source):
                symbol = self._best(frame, source, previous, context)
            if symbol not in (BLANK, previous):
                context = self.extend(context, symbol)
            previous = symbol
            chosen.append(symbol)
        return chosen

    def _best(self, frame: Scores, source: SourcePrefix, previous: int, context: Context) -> int:
        """Return the symbol with the best score less its penalty."""
        for count in (min(TOP, len(frame)), len(frame)):
            top = np.argpartition(frame, -count)[-count:]
            best, best_score = BLANK, -np.inf
            for symbol in map(int, top[np.argsort(-frame[top])]):
                if frame[symbol] <= best_score:
                    return best  # all others score less even without a penalty
                penalty = 0.0 if symbol in (BLANK, previous) else self.penalty(symbol, context, source)
                if frame[symbol] - penalty > best_score:
                    best, best_score = symbol, frame[symbol] - penalty
        return best


class EarlyFullStop:
    """Keeps a transducer from writing a full stop before the source has one.

    The model sees the end of the sentence in its look-ahead, while words before it are still to be translated.
    """

    def __init__(self, source: Tokenizer, target: Tokenizer) -> None:
        self._ends = {END, *_containing(source.pieces, frozenset(SENTENCE_ENDS))}
        self.symbols = np.array(_containing(target.pieces, _FULL_STOPS), dtype=np.int64)

    def allows(self, tokens: Sequence[int], position: int) -> bool:
        """Return whether the source has a full stop at this position or the one before."""
        return not self._ends.isdisjoint(tokens[max(0, position - 1) : position + 1])


def _containing(pieces: Sequence[str], characters: frozenset[str]) -> list[int]:
    return [index for index, piece in enumerate(pieces) if not characters.isdisjoint(piece)]


class DoubledPunctuation:
    """Text filter that reduces punctuation marks in a row to one, and drops empty quotation marks and brackets.

    A comma before a full stop is dropped, as is one after it in Chinese. Since written text never changes, a mark that
    may be dropped is held back until the next character, or the end of the sentence.
    """

    def __init__(self) -> None:
        self._last = ""  # last character written
        self._held = ""  # the mark after it that is held back

    def push(self, text: str) -> str:
        """Return the text that can be written now."""
        written = ""
        for character in text:
            if self._held and _CLOSING.get(self._held) == character:
                self._held = ""  # empty quotation marks or brackets
                continue
            if self._held and not self._is_replaced_by(character):
                written += self._held
            self._held = ""
            self._last = written[-1:] or self._last
            if character in _CHINESE_CLAUSE and self._last in _NO_CLAUSE_AFTER:
                continue
            if character in _CLAUSE or character in _CLOSING:
                self._held = character
            else:
                written += character
        self._last = written[-1:] or self._last
        return written

    def finish(self) -> str:
        """Return what is held back at the end of the sentence."""
        held, self._held = self._held, ""
        return held

    def _is_replaced_by(self, character: str) -> bool:
        is_scope = self._held == character == ":"  # std::vector
        return self._held in _CLAUSE and character in _MARKS and not is_scope


def folded_words(text: str) -> list[str]:
    """Return the words of a text, case-folded and with plain apostrophes; numbers are left out."""
    return [word for word in _WORD.findall(_fold(text)) if not word[0].isdigit()]


def frequent_words(texts: Iterable[str], min_count: int = MIN_COUNT) -> list[str]:
    """Return the words that occur often enough to be known, sorted and without possessive endings."""
    counts = Counter(_POSSESSIVE.sub("", word) for text in texts for word in folded_words(text))
    return sorted(word for word, count in counts.items() if count >= min_count)


def _fold(text: str) -> str:
    return text.casefold().replace("’", "'")


NO_RULES = DecodingRules()

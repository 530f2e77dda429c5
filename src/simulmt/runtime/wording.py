"""What symbols pay that would spoil the wording: they write the same again, or tear a word.

CTC chooses the symbols of neighbouring frames independently of each other, so both may write the word that lies between
them, or each a part of another one. What stands there already says which symbols do. They pay and are not banned: some
words are said twice, and some are new.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from simulmt.text import BLANK, SPACE, SPECIAL_SYMBOLS, Tokenizer

Scores = np.ndarray[Any, np.dtype[Any]]

# Kana are left out: they are letters, and many a Japanese word has the same one twice in a row.
_IDEOGRAPH = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
# Letters and digits of scripts whose words are told apart by what stands between them, with the marks above, below and
# between them that Python does not count as letters; and apostrophes inside. Thai, Chinese and the like are left out.
_LETTER = "[^\\W_\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3001-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff]"
_MARK = (
    "[\u0300-\u036f\u0483-\u0489\u0591-\u05bd\u05bf-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u06d6-\u06ed"
    "\u0900-\u0963\u0966-\u0dff\u200c\u200d]"
)
_WORD = re.compile(f"{_LETTER}(?:{_LETTER}|{_MARK}|')*")
_POSSESSIVE = re.compile("'s?$")

LEAST_SEEN = 5  # how often a text must have a word for it to count as one
LIKELY = 32  # symbols among which the best nearly always is


class Context(NamedTuple):
    """What of a translation matters to its next symbol."""

    last: int = BLANK  # the symbol that was written last; blank if none was
    word: str = ""  # the word that it left unfinished, folded
    is_noun: bool = False  # whether that word has a capital though no sentence begins with it, as German nouns do


class Heard:
    """What was read of the source when a symbol is chosen."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = tokens
        self._words: list[str] | None = None

    def words(self, texts: Sequence[str]) -> list[str]:
        """Its words, given what each token says."""
        if self._words is None:
            self._words = folded_words("".join(texts[token] for token in self.tokens))
        return self._words


def folded_words(text: str) -> list[str]:
    """The words of a text without the difference of capitals and of apostrophes; numbers are none."""
    return [word for word in _WORD.findall(_folded(text)) if not word[0].isdigit()]


def frequent_words(texts: Iterable[str], least: int = LEAST_SEEN) -> list[str]:
    """The words that stand in texts so often or more, without possessives, in order."""
    counts = Counter(_POSSESSIVE.sub("", word) for text in texts for word in folded_words(text))
    return sorted(word for word, count in counts.items() if count >= least)


class Wording:
    """Knows the penalties of a model: for what is written again, and for words that neither `words` nor the source has.

    A symbol writes again if it is the last one once more and more than a letter or a number, if it begins with the
    ideograph that the last one ends with, or if it begins a word anew that was begun like a German noun ("Good Mor
    morning"). It tears a word if what it makes of the unfinished one, or begins, is the
    beginning neither of a known word nor of one of the source as far as that was read. A torn word is not torn twice.
    """

    def __init__(
        self,
        pieces: Sequence[str],
        source_pieces: Sequence[str] = (),
        *,
        repeat_penalty: float = 0.0,
        word_penalty: float = 0.0,
        words: Sequence[str] = (),
    ) -> None:
        self.repeat_penalty = repeat_penalty
        self._word_penalty = word_penalty
        self._words = words  # in order
        self._texts = _texts(pieces)
        self._folded_texts = [_folded(text) for text in self._texts]
        self._source_texts = _texts(source_pieces)

    @classmethod
    def of(
        cls,
        source: Tokenizer,
        target: Tokenizer,
        *,
        repeat_penalty: float = 0.0,
        word_penalty: float = 0.0,
        words: Sequence[str] = (),
    ) -> Self | None:
        """The penalties of a model with these vocabularies; None if there are none."""
        if not repeat_penalty and not word_penalty:
            return None
        penalties = {"repeat_penalty": repeat_penalty, "word_penalty": word_penalty}
        return cls(target.pieces, source.pieces, **penalties, words=words)

    def after(self, context: Context, symbol: int) -> Context:
        """The context once a symbol was written."""
        if not self._word_penalty:
            return Context(symbol)
        text = context.word + self._folded_texts[symbol]
        words = _WORD.findall(text)
        word = words[-1] if words and text.endswith(words[-1]) else ""
        begins = self._texts[symbol].startswith(" ")
        is_noun = self._texts[symbol][1:2].isupper() and context.word != "" if begins else context.is_noun
        return Context(symbol, word, is_noun and word != "")

    def penalty(self, symbol: int, context: Context, heard: Heard) -> float:
        """What a symbol pays that would be written next."""
        total = 0.0
        if self.repeat_penalty and (self._writes_again(symbol, context.last) or self._begins_anew(symbol, context)):
            total += self.repeat_penalty
        if self._word_penalty and self._tears(symbol, context.word, heard):
            total += self._word_penalty
        return total

    def choose(
        self,
        symbols: Iterable[int],
        scores: Iterable[Scores],
        heard: Iterable[Heard],
        previous: int,
        context: Context,
    ) -> list[int]:
        """The best symbols of frames, given the best without penalties, all scores [V], and what was heard for each.

        `previous` is the symbol of the frame before them, which goes on without being written again.
        """
        chosen = []
        for symbol, frame, source in zip(symbols, scores, heard, strict=True):
            if symbol not in (BLANK, previous) and self.penalty(symbol, context, source):
                symbol = self._best(frame, source, previous, context)
            if symbol not in (BLANK, previous):
                context = self.after(context, symbol)
            previous = symbol
            chosen.append(symbol)
        return chosen

    def _best(self, frame: Scores, heard: Heard, previous: int, context: Context) -> int:
        """The best symbol once those that must have paid."""
        for count in (min(LIKELY, len(frame)), len(frame)):
            likely = np.argpartition(frame, -count)[-count:]
            best, most = BLANK, -np.inf
            for symbol in map(int, likely[np.argsort(-frame[likely])]):
                if frame[symbol] <= most:
                    return best  # this and all that follow are behind, without having paid
                paid = 0.0 if symbol in (BLANK, previous) else self.penalty(symbol, context, heard)
                if frame[symbol] - paid > most:
                    best, most = symbol, frame[symbol] - paid
        return best

    def _begins_anew(self, symbol: int, context: Context) -> bool:
        if not context.is_noun or context.word == "i":  # which English writes with a capital anywhere
            return False
        text, beginning = self._texts[symbol], f" {context.word}"
        return text[1:2].islower() and len(text) > len(beginning) and self._folded_texts[symbol].startswith(beginning)

    def _writes_again(self, symbol: int, last: int) -> bool:
        text, before = self._texts[symbol].strip(), self._texts[last]
        if symbol == last and (sum(map(str.isalpha, text)) > 1 or _IDEOGRAPH.match(text)):
            return True
        return text[:1] == before[-1:] and _IDEOGRAPH.match(text) is not None

    def _tears(self, symbol: int, word: str, heard: Heard) -> bool:
        for found in _WORD.finditer(word + self._folded_texts[symbol]):
            if found.end() > len(word):  # the first word that the symbol adds to
                goes_on = bool(word) and found.start() == 0
                is_torn_already = goes_on and not self._may_become_a_word(word, heard)
                return not is_torn_already and not self._may_become_a_word(found.group(), heard)
        return False

    def _may_become_a_word(self, beginning: str, heard: Heard) -> bool:
        stem = _POSSESSIVE.sub("", beginning)  # any name may have one
        if not stem or stem[0].isdigit() or self._is_known(stem):
            return True
        name = stem.rpartition("'")[2]  # as in d'Artagnan
        copied = (stem, name) if len(name) > 1 else (stem,)
        return any(word.startswith(copied) for word in heard.words(self._source_texts))

    def _is_known(self, beginning: str) -> bool:
        place = bisect_left(self._words, beginning)
        return place < len(self._words) and self._words[place].startswith(beginning)


def _folded(text: str) -> str:
    return text.casefold().replace("’", "'")


def _texts(pieces: Sequence[str]) -> list[str]:
    """What each piece writes; special symbols leave no trace."""
    return [""] * len(SPECIAL_SYMBOLS) + [piece.replace(SPACE, " ") for piece in pieces[len(SPECIAL_SYMBOLS) :]]

"""SentencePiece tokenizers with shared special symbols."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import sentencepiece

from simulmt.config import require
from simulmt.errors import VocabularyError
from simulmt.files import write_atomic
from simulmt.text.words import canonicalize, collapse_spaces, is_spaceless, split_words

# The same ids in every vocabulary, source and target.
PAD, UNK, START, END, BLANK, MASK = range(6)
SPECIAL_SYMBOLS = ("<pad>", "<unk>", "<s>", "</s>", "<blank>", "<mask>")

# Back-translated training sources begin with this tag, which is encoded as START. No other source contains START and
# no text encodes to it, so a user who types the tag gets the pieces of its characters.
BACK_TRANSLATED = "<bt> "

UNSPACED_LANGUAGES = ("zh", "ja", "yue")  # written without spaces between words
SPACE = "▁"  # SentencePiece's symbol for a space inside a piece
WORD_CACHE_SIZE = 1 << 16
MAX_CACHED_WORD_LENGTH = 24  # characters; bounds memory for untrusted input
# SentencePiece's advice about an option of its own command line.
_COVERAGE_ADVICE = " or decrease character_coverage with --character_coverage option"

Normalization = Literal["nmt_nfkc_cf", "nmt_nfkc", "identity"]


@dataclass(frozen=True)
class VocabularySpec:
    """How to train a vocabulary; `spaced` is False for languages written without spaces."""

    size: int = 32_000
    normalization: Normalization = "nmt_nfkc"
    character_coverage: float = 1.0
    spaced: bool = True
    sample: int = 2_000_000  # random sample of sentences to train on

    def __post_init__(self) -> None:
        require(self.size > len(SPECIAL_SYMBOLS), f"size must be above {len(SPECIAL_SYMBOLS)}, got {self.size}")
        require(
            0.98 <= self.character_coverage <= 1.0,
            f"character_coverage must be in 0.98..1.0, got {self.character_coverage}",
        )
        require(self.sample > 100, f"sample must be above 100, got {self.sample}")

    @staticmethod
    def for_target(language: str, size: int = 32_000, uncased: bool = False, sample: int = 2_000_000) -> VocabularySpec:
        """Return the settings of a target vocabulary; text of languages without spaces is not normalised."""
        if re.split("[-_]", language.lower())[0] in UNSPACED_LANGUAGES:
            folding: Normalization = "nmt_nfkc_cf" if uncased else "identity"
            # 0.9995 leaves out a third of the characters that everyday text needs, such as those of 海豚 and 匈牙利.
            return VocabularySpec(size, folding, character_coverage=0.9999, spaced=False, sample=sample)
        return VocabularySpec(size, "nmt_nfkc_cf" if uncased else "nmt_nfkc", sample=sample)


class Tokenizer:
    """A SentencePiece vocabulary; encodes word by word, so streams and files agree exactly."""

    def __init__(self, model: bytes, origin: str = "vocabulary") -> None:
        self.model = model
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
            self.size: int = self._processor.vocab_size()
            self.pieces: list[str] = self._processor.id_to_piece(list(range(self.size)))
        except (RuntimeError, UnicodeDecodeError):
            raise VocabularyError(f"{origin}: not a SentencePiece model") from None
        if tuple(self.pieces[: len(SPECIAL_SYMBOLS)]) != SPECIAL_SYMBOLS:
            raise VocabularyError(
                f"{origin}: the first pieces must be {' '.join(SPECIAL_SYMBOLS)}; train the vocabulary with simulmt"
            )
        # Models for text without spaces are trained without a leading space before each word.
        self.spaced: bool = self._processor.normalize("a").startswith(SPACE)
        # Whether each piece begins a word; END does.
        self.word_starts = [piece.startswith(SPACE) or token == END for token, piece in enumerate(self.pieces)]
        self._encode_short = lru_cache(maxsize=WORD_CACHE_SIZE)(self._encode)

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[bytes]]:
        return Tokenizer, (self.model,)

    @staticmethod
    def load(path: Path) -> Tokenizer:
        """Read a vocabulary from its .model file."""
        try:
            return Tokenizer(path.read_bytes(), str(path))
        except FileNotFoundError:
            raise VocabularyError(f"{path}: no such vocabulary file") from None
        except OSError as error:
            raise VocabularyError(f"{path}: cannot be read: {error.strerror}") from None

    @staticmethod
    def train(lines: Iterable[str], path: Path, spec: VocabularySpec) -> Tokenizer:
        """Train a vocabulary on lines of text and write it to `path`."""
        model = io.BytesIO()
        failures: list[BaseException] = []
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=_training_text(lines, spec.spaced, failures),
                model_writer=model,
                model_type="unigram",
                vocab_size=spec.size,
                character_coverage=spec.character_coverage,
                normalization_rule_name=spec.normalization,
                add_dummy_prefix=spec.spaced,
                split_digits=True,  # so that numbers can be copied digit by digit
                input_sentence_size=spec.sample,
                pad_id=PAD,
                unk_id=UNK,
                bos_id=START,
                eos_id=END,
                pad_piece=SPECIAL_SYMBOLS[PAD],
                control_symbols=[SPECIAL_SYMBOLS[BLANK], SPECIAL_SYMBOLS[MASK]],
                minloglevel=2,
            )
        except RuntimeError as error:
            if failures:
                raise failures[0] from None
            reason = str(error).rsplit("] ", 1)[-1].replace(_COVERAGE_ADVICE, "").strip() or "no text"
            raise VocabularyError(f"cannot train {spec.size} pieces for {path}: {reason}") from None
        tokenizer = Tokenizer(model.getvalue(), str(path))
        write_atomic(path, tokenizer.model)
        return tokenizer

    def with_characters(self, characters: str) -> Tokenizer:
        """Return a vocabulary with more characters, after the existing pieces; needs protobuf."""
        from sentencepiece import sentencepiece_model_pb2  # the runtime does without protobuf

        model: Any = sentencepiece_model_pb2.ModelProto.FromString(self.model)  # type: ignore[attr-defined]
        score = min(piece.score for piece in model.pieces) - 1  # used only where no other piece fits
        for character in characters:
            model.pieces.add(piece=character, score=score)
        model.trainer_spec.vocab_size = len(model.pieces)
        return Tokenizer(model.SerializeToString())

    def knows(self, character: str) -> bool:
        """Return whether a character can be encoded."""
        return UNK not in self._processor.encode(character)

    def encode(self, text: str) -> list[int]:
        """Encode a sentence, without END."""
        if not self.spaced:
            ids: list[int] = self._processor.encode(collapse_spaces(text))
            return ids
        return [token for word in split_words(text) for token in self.encode_word(word)]

    def encode_training_source(self, text: str) -> list[int]:
        """Encode a source sentence, without END; the tag of a back-translation becomes one symbol."""
        words = text.removeprefix(BACK_TRANSLATED)
        return [START, *self.encode(words)] if len(words) < len(text) else self.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids, skipping special symbols."""
        detokenizer = Detokenizer(self)
        return "".join(detokenizer.push(token) for token in ids)

    def split_to_word_tokens(self, ids: Sequence[int]) -> list[list[int]]:
        """Split ids at word starts."""
        words: list[list[int]] = []
        for token in ids:
            if not words or self.word_starts[token]:
                words.append([])
            words[-1].append(token)
        return words

    def encode_word(self, word: str) -> tuple[int, ...]:
        """Encode one word, without characters that the vocabulary lacks; an emoji, say, has no ids."""
        return self._encode_short(word) if len(word) <= MAX_CACHED_WORD_LENGTH else self._encode(word)

    def _encode(self, word: str) -> tuple[int, ...]:
        ids = self._processor.encode(canonicalize(word))
        known = tuple(token for token in ids if token != UNK)
        return known if any(self.pieces[token] != SPACE for token in known) else ()


class Detokenizer:
    """Converts ids to text incrementally; output is append-only."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._pieces = tokenizer.pieces
        self._last = ""  # the last character written; empty at the start of a sentence
        self._space_due = False

    def push(self, token: int) -> str:
        """Return the text that `token` adds, possibly none."""
        if not 0 <= token < len(self._pieces):
            raise VocabularyError(f"token id {token} is not in 0..{len(self._pieces) - 1}")
        if token < len(SPECIAL_SYMBOLS):
            return ""
        text = self._pieces[token].replace(SPACE, " ")
        # A space is written only when text follows, so no sentence begins or ends with one.
        body = text.lstrip(" ")
        self._space_due |= len(body) < len(text)
        if not body:
            return ""
        needs_space = self._space_due and self._last and not (is_spaceless(self._last) and is_spaceless(body[0]))
        stripped = body.rstrip(" ")
        self._space_due = len(stripped) < len(body)
        self._last = stripped[-1]
        return f" {stripped}" if needs_space else stripped


def _training_text(lines: Iterable[str], spaced: bool, failures: list[BaseException]) -> Iterator[str]:
    """Yield lines split as in `encode`; collect errors, which the trainer would replace by its own."""
    try:
        for line in lines:
            yield " ".join(map(canonicalize, split_words(line))) if spaced else collapse_spaces(line)
    except (Exception, KeyboardInterrupt) as failure:
        failures.append(failure)
        raise

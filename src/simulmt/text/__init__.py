"""Convert text to token ids and back, word by word.

Whole-sentence functions are built on incremental ones, so a live stream sees exactly what training saw:

    characters --WordSplitter--> words --Tokenizer.encode_word--> ids
    ids --Detokenizer--> characters, append-only
"""

from simulmt.text.tokenizer import (
    BACK_TRANSLATED,
    BLANK,
    END,
    MASK,
    PAD,
    SPACE,
    SPECIAL_SYMBOLS,
    START,
    UNK,
    Detokenizer,
    Normalization,
    Tokenizer,
    VocabularySpec,
)
from simulmt.text.words import MAX_WORD_LENGTH, WordSplitter, split_words

__all__ = [
    "BACK_TRANSLATED",
    "BLANK",
    "END",
    "MASK",
    "MAX_WORD_LENGTH",
    "PAD",
    "SPACE",
    "SPECIAL_SYMBOLS",
    "START",
    "UNK",
    "Detokenizer",
    "Normalization",
    "Tokenizer",
    "VocabularySpec",
    "WordSplitter",
    "split_words",
]

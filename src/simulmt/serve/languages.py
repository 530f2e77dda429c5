"""Language codes, names and detection."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from py3langid.langid import MODEL_FILE, LanguageIdentifier  # type: ignore[import-untyped]

AUTO = "auto"  # detect the source language
NAMES = {"de": "German", "en": "English", "zh": "Chinese"}
TRADITIONAL_CHINESE = {"zt", "zh-hant", "zh-tw", "zh-hk", "zh-mo"}
LONGEST_SAMPLE = 2_000  # characters that detection looks at


def name_of(code: str) -> str:
    return NAMES.get(code, code.title())


def base_code(code: str) -> str:
    """Reduce a language tag such as zh-Hans or de_AT to the code of the models, zh or de.

    Traditional Chinese stays as it is: no model writes it.
    """
    tag = code.lower().replace("_", "-")
    return tag if tag in TRADITIONAL_CHINESE else tag.partition("-")[0]


class Detector:
    """Offline language detection among a few languages."""

    def __init__(self, languages: Iterable[str]) -> None:
        self._languages = list(dict.fromkeys(languages))

    def detect(self, text: str) -> list[tuple[str, float]]:
        """Return the languages with their confidence in percent, the most likely first."""
        if len(self._languages) == 1 or self._identifier is None:
            return [(language, 100.0 / len(self._languages)) for language in self._languages]
        return [(language, round(100 * float(p), 1)) for language, p in self._identifier.rank(text[:LONGEST_SAMPLE])]

    @cached_property
    def _identifier(self) -> LanguageIdentifier | None:
        """An identifier of those of the languages that it knows; None if it knows none."""
        identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        known = [language for language in self._languages if language in identifier.labels]
        if not known:
            return None
        identifier.set_languages(known)
        return identifier

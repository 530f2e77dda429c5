"""One punctuation mark where a model writes several: of a comma and a full stop in a row, the full stop.

CTC chooses the symbols of neighbouring frames independently of each other, so one may end a clause where the next ends
the sentence, or two may open and close a quotation that nobody writes. What was written is never taken back; therefore
a mark that others replace, and one that opens, waits for what follows it.
"""

from __future__ import annotations

_CLAUSE = frozenset(",;:，、；：")
_MARKS = _CLAUSE | frozenset(".!?。！？")
_NO_CLAUSE_AFTER = frozenset("。！？，、；：")  # unlike ".", which may end an abbreviation
_CLOSING = dict(zip("“‘《（「『【", "”’》）」』】", strict=True))  # not "()", which follow the names of functions


class Marks:
    """Takes the text of a sentence as it comes, and gives it back with one mark at a time."""

    def __init__(self) -> None:
        self._last = ""  # the last character given back
        self._waiting = ""  # a mark behind it

    def push(self, text: str) -> str:
        """The text that can be written now."""
        written = ""
        for character in text:
            if self._waiting and _CLOSING.get(self._waiting) == character:
                self._waiting = ""  # nothing was between them
                continue
            if self._waiting and not self._is_replaced_by(character):
                written += self._waiting
            self._waiting = ""
            self._last = written[-1:] or self._last
            if character in "，、；：" and self._last in _NO_CLAUSE_AFTER:
                continue
            if character in _CLAUSE or character in _CLOSING:
                self._waiting = character
            else:
                written += character
        self._last = written[-1:] or self._last
        return written

    def finish(self) -> str:
        """What is left at the end of the sentence."""
        left, self._waiting = self._waiting, ""
        return left

    def _is_replaced_by(self, character: str) -> bool:
        is_name = self._waiting == character == ":"  # of a part of a program
        return self._waiting in _CLAUSE and character in _MARKS and not is_name


def one_mark(text: str) -> str:
    """A whole sentence at once."""
    marks = Marks()
    return marks.push(text) + marks.finish()

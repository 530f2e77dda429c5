"""What one server, one client and one stream may take up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from simulmt.config import require


@dataclass(frozen=True)
class Limits:
    """Every bound of the server; each is an option of `simulmt serve`."""

    streams: int = 256  # live at once
    streams_per_address: int = 64
    requests: int = 32  # HTTP translations at once
    message_bytes: int = 65_536
    characters_per_second: float = 5_000.0  # of one stream; what comes faster has to wait
    burst_characters: int = 500_000  # that may come at once, so that a long session can be replayed
    unread_messages: int = 64  # from the client, taken in but not yet computed
    unsent_messages: int = 256  # to the client; then its stream pauses
    kept_messages: int = 4_096  # sent, and kept for a client that comes back
    opening_seconds: float = 10.0  # until the first message of a connection
    idle_seconds: float = 900.0
    session_seconds: float = 6 * 3600.0
    grace_seconds: float = 120.0  # to resume in after a lost connection
    sending_seconds: float = 20.0  # that one message may take to be sent
    ping_seconds: float = 20.0  # between pings, and to answer one
    drain_seconds: float = 10.0  # to shut down in

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            require(value > 0, f"{field.name} must be above 0, got {value}")


class Throttle:
    """A bucket of characters that fills at a constant rate; whoever takes more than it holds has to wait."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._level = burst
        self._filled = clock()

    def take(self, characters: int) -> float:
        """Take characters out; how many seconds to wait before going on."""
        now = self._clock()
        self._level = min(self._burst, self._level + (now - self._filled) * self._rate)
        self._filled = now
        self._level -= characters
        return max(0.0, -self._level / self._rate)

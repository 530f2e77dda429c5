"""HTTP and WebSocket protocols with protection against slow, idle and flooding peers, and flow control of streams.

Subclasses of uvicorn's protocols cap the number of connections, give requests a deadline, and end every WebSocket with
an `error` message that gives the reason. A stream is bounded by a rate (`Throttle`), by what is received and not yet
translated (`Budget`), and by what is written and not yet sent (`Outbox`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections import deque
from collections.abc import Callable, Collection
from http import HTTPStatus
from typing import Any, NamedTuple

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import PayloadTooBig
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import State

from simulmt.serve.access import Counted, Counters, Limits
from simulmt.serve.models import Metrics
from simulmt.serve.protocol import Ack, Commit, Done, Error, ErrorCode, Sentence, Transcript, Undone, write

logger = logging.getLogger("simulmt.serve")

CLOSING_SECONDS = 5.0  # for a peer to read the last message and close its side
ANY_PROXY = "*"
QUEUED_MESSAGES = 16  # received but not yet read by the application; at the limit reading pauses (back-pressure)
# Bytes sent after which the peer must answer a ping. Without this bound the network would buffer megabytes for a slow
# reader, and its pong would come far too late.
UNCONFIRMED_BYTES = 65_536
# Limit on pings, pongs and continuation frames of a peer: per second, and burst.
CONTROL_FRAMES_PER_SECOND, CONTROL_FRAMES_BURST = 100.0, 1_000
Output = Commit | Sentence | Undone | Ack | Transcript | Done | Error


class ConnectionLimiter:
    """Counts open connections, and refuses those above the limits.

    When the server is full, the oldest connection without a request is closed, so that idle connections cannot lock
    others out. Peers in `proxies` connect on behalf of many clients and are not limited per address.
    """

    def __init__(
        self, limits: Limits, counters: Counters, metrics: Metrics, max_connections: int, proxies: Collection[str] = ()
    ) -> None:
        self.limits = limits
        self.metrics = metrics
        self._counters = counters
        self._max_connections = max_connections  # of this process
        self._proxies = proxies
        self._addresses: dict[asyncio.Transport, str] = {}
        self._idle: dict[asyncio.Transport, None] = {}  # no request yet, oldest first

    def add(self, transport: asyncio.Transport, address: str) -> str | None:
        """Count a new connection; return the reason if it is refused."""
        limits, counters = self.limits, self._counters
        at_address = counters.of(Counted.CONNECTIONS, address)
        is_limited = address not in self._proxies and ANY_PROXY not in self._proxies
        if is_limited and at_address >= limits.connections_per_address:
            return f"too many connections from this address (limit {limits.connections_per_address})"
        if len(self._addresses) >= self._max_connections or counters.total(Counted.CONNECTIONS) >= limits.connections:
            if not self._idle:
                return "too many connections; try again later"
            oldest = next(iter(self._idle))
            self.remove(oldest)
            oldest.abort()
        self._addresses[transport] = address
        self._idle[transport] = None
        counters.add(Counted.CONNECTIONS, address)
        return None

    def mark_active(self, transport: asyncio.Transport) -> None:
        """Mark a connection that has sent a complete request."""
        self._idle.pop(transport, None)

    def remove(self, transport: asyncio.Transport) -> None:
        """Stop counting a connection; do nothing if it is not counted."""
        self._idle.pop(transport, None)
        address = self._addresses.pop(transport, None)
        if address is not None:
            self._counters.add(Counted.CONNECTIONS, address, -1)


class HttpProtocol(H11Protocol):
    """HTTP/1.1 with a limit on connections and a deadline for every request to arrive."""

    def __init__(self, *, limiter: ConnectionLimiter, **settings: Any) -> None:
        super().__init__(**settings)
        self._limiter = limiter
        self._deadline: asyncio.TimerHandle | None = None
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client is not None:  # else a Unix socket: another worker of this server
            refusal = self._limiter.add(transport, self.client[0])
            if refusal is not None:
                self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, refusal)
                return
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        self._limiter.remove(self.transport)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        if self.transport.get_protocol() is not self:  # it is a WebSocket now
            return
        if self._is_awaiting_request():
            if self._deadline is None:
                self._set_deadline()
        else:
            self._limiter.mark_active(self.transport)
            self._clear_deadline()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._clear_deadline()
        self._limiter.mark_active(self.transport)
        super().handle_websocket_upgrade(event)

    def on_response_complete(self) -> None:
        self._clear_deadline()  # the keep-alive timeout takes over
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(HTTPStatus.BAD_REQUEST, msg)

    def _is_awaiting_request(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    def _set_deadline(self) -> None:
        seconds = self._limiter.limits.request_seconds
        message = f"no complete request within {seconds:g} seconds"
        self._deadline = self.loop.call_later(seconds, self._refuse, HTTPStatus.REQUEST_TIMEOUT, message)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Answer with an error, whatever state the request is in, and close the connection."""
        self._is_refused = True
        if self.transport.is_closing():
            return
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body = json.dumps({"error": message}).encode()
            head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """A WebSocket with limits on what a peer can send, and an error message on closing."""

    def __init__(self, *, limiter: ConnectionLimiter, **settings: Any) -> None:
        super().__init__(**settings)
        self._limiter = limiter
        self._sending_deadline: asyncio.TimerHandle | None = None
        self.close_timeout = CLOSING_SECONDS
        self._is_failed = False
        self._unconfirmed = 0  # bytes sent since the last answer to a ping
        self._is_confirmed = asyncio.Event()
        self._control_frames = Throttle(CONTROL_FRAMES_PER_SECOND, CONTROL_FRAMES_BURST, self.loop.time)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limiter.remove(self.transport)
        if self._sending_deadline is not None:
            self._sending_deadline.cancel()
        self._confirm()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        message = "the client does not read what is sent"
        self._sending_deadline = self.loop.call_later(
            self._limiter.limits.sending_seconds, self.fail, ErrorCode.SLOW_READER, message
        )

    def resume_writing(self) -> None:
        if self._sending_deadline is not None:
            self._sending_deadline.cancel()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if not self._is_failed:  # else discard input until the peer has read the error
            super().data_received(data)

    def handle_events(self) -> None:
        if not self._is_failed:
            super().handle_events()

    def handle_ping(self) -> None:
        if self._admit_control_frame():
            super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        if self.pending_ping_payload is not None and bytes(event.data) == self.pending_ping_payload:
            self._confirm()
            super().handle_pong(event)
        else:
            self._admit_control_frame()

    def handle_cont(self, event: Frame) -> None:
        if self._admit_control_frame():
            super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        """Queue a message; unlike uvicorn, stop reading only when several are queued, not after each one."""
        data, self.frames = b"".join(self.frames), []
        if self.close_sent:
            return
        if self.curr_msg_data_type == "text":
            try:
                self.queue.put_nowait({"type": "websocket.receive", "text": data.decode()})
            except UnicodeDecodeError:
                self.fail(ErrorCode.BAD_MESSAGE, "the text is not valid UTF-8", CloseCode.INVALID_DATA)
        else:
            self.queue.put_nowait({"type": "websocket.receive", "bytes": data})
        if self.queue.qsize() >= QUEUED_MESSAGES and not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()
            self._confirm()  # a pong would not be read

    def handle_parser_exception(self) -> None:
        if isinstance(self.conn.parser_exc, PayloadTooBig):
            self.fail(ErrorCode.TOO_BIG, "the message is far too long; send the text in smaller parts")
        else:
            self.fail(ErrorCode.BAD_MESSAGE, f"invalid WebSocket frame: {self.conn.parser_exc}")

    def keepalive_timeout(self) -> None:
        if self.read_paused:  # the pong may be queued behind unread messages
            self.pong_timer = self.pending_ping_payload = None
            self.schedule_ping()
        else:
            self.fail(ErrorCode.UNRESPONSIVE, f"no answer to a ping within {self.ping_timeout:g} seconds")

    def shutdown(self) -> None:
        if self.handshake_complete and not self.close_sent:
            self.fail(ErrorCode.DRAINING, "the server is shutting down")
        super().shutdown()

    async def send(self, message: Any) -> None:
        await self.writable.wait()
        if self._is_failed:
            raise ClientDisconnected
        await super().send(message)
        if message["type"] == "websocket.send":
            await self._apply_back_pressure(len(message.get("text") or message.get("bytes") or ""))
        if message["type"] == "websocket.close" and self.close_timer is not None:
            # transport.close() would wait indefinitely for the peer to read.
            self.close_timer.cancel()
            self.close_timer = self.loop.call_later(self.close_timeout, self.transport.abort)

    def fail(self, code: ErrorCode, message: str, close_code: int | None = None) -> None:
        """Send an error, close, and discard whatever the peer still sends."""
        if self.close_sent or self.transport.is_closing():
            return
        if not self.handshake_complete:
            self.transport.close()
            return
        logger.info("connection closed: %s", code)
        self._limiter.metrics.errors.labels(code).inc()
        self._is_failed = self.close_sent = True
        self.stop_keepalive()
        self.writable.set()  # wake up pending sends
        self._confirm()
        close_code = code.close_code if close_code is None else close_code
        self.queue.put_nowait({"type": "websocket.disconnect", "code": close_code, "reason": code})
        if self.conn.state is State.OPEN:  # else the parser has failed and sends its own close frame
            self.conn.send_close(close_code, code)
        explanation = Frame(Opcode.TEXT, write(Error(code, message)).encode()).serialize(mask=False)
        self.transport.write(explanation + b"".join(self.conn.data_to_send()))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        self.close_timer = self.loop.call_later(self.close_timeout, self.transport.abort)

    async def _apply_back_pressure(self, size: int) -> None:
        """Count bytes sent; above the limit, wait for a pong, which shows that the peer has read them."""
        self._unconfirmed += size
        if self._unconfirmed < UNCONFIRMED_BYTES or self.read_paused or self.close_sent:
            return
        self._is_confirmed.clear()
        if self.pending_ping_payload is None:
            if self.ping_timer is not None:
                self.ping_timer.cancel()
            self.send_keepalive_ping()
        await self._is_confirmed.wait()

    def _confirm(self) -> None:
        self._unconfirmed = 0
        self._is_confirmed.set()

    def _admit_control_frame(self) -> bool:
        if self._control_frames.take(1) > 0:
            self.fail(ErrorCode.FLOODING, f"more than {CONTROL_FRAMES_PER_SECOND:g} pings or fragments a second")
        return not self._is_failed


class Throttle:
    """A token bucket that fills at a constant rate."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._level = burst
        self._filled = clock()

    def take(self, tokens: int) -> float:
        """Take tokens out; return the seconds to wait before continuing."""
        now = self._clock()
        self._level = min(self._burst, self._level + (now - self._filled) * self._rate) - tokens
        self._filled = now
        return max(0.0, -self._level / self._rate)


class Budget:
    """Back-pressure: a bound on outstanding characters or samples; `spend` waits while it is exceeded."""

    def __init__(self, capacity: float) -> None:
        self._capacity = self._remaining = capacity
        self._available = asyncio.Event()
        self._available.set()

    @property
    def is_used(self) -> bool:
        """Whether anything is outstanding."""
        return self._remaining < self._capacity

    async def spend(self, cost: int) -> None:
        """Wait until some budget is left, then spend `cost`, even if that exceeds what is left."""
        await self._available.wait()
        self.refund(-cost)

    def refund(self, cost: int) -> None:
        self._remaining += cost
        self._available.set() if self._remaining > 0 else self._available.clear()


class Entry(NamedTuple):
    message: Output
    seq: int  # of the last commit up to here
    implied_by: float  # seq: a client that has this commit also has this message; inf: always send it


class Outbox:
    """A bounded queue of messages that can be rewound to a commit.

    Keeps up to `max_sent` sent messages for clients that resume. `commit` is the type of message that clients resume
    after: Transcript in a session that only recognises.
    """

    def __init__(self, max_unsent: int, max_sent: int, commit: type[Commit | Transcript] = Commit) -> None:
        self._max_unsent = max_unsent
        self._max_sent = max_sent
        self._commit = commit
        self._entries: deque[Entry] = deque()
        self._sent = 0  # number of entries sent
        self._seq = 0  # of the last commit
        self._last_dropped = 0  # the last commit that is no longer kept
        self._last_received = 0  # the last commit that the client has
        self._has_messages = asyncio.Event()
        self._has_space = asyncio.Event()
        self._has_space.set()

    def put(self, message: Output) -> None:
        """Add a message, even if the queue is full; await `wait_for_space` before writing more."""
        implied_by: float = self._seq + 1
        if isinstance(message, self._commit):
            implied_by = self._seq = message.seq
        elif isinstance(message, Done | Error):
            implied_by = math.inf
        self._entries.append(Entry(message, self._seq, implied_by))
        self._update()

    async def wait_for_space(self) -> None:
        """Wait until the queue is not full."""
        await self._has_space.wait()

    async def wait_for_message(self) -> None:
        """Wait until there is a message to send."""
        await self._has_messages.wait()

    def take(self) -> Output | None:
        """Return the next message to send, or None if the client must already have it."""
        entry = self._entries[self._sent]
        self._sent += 1
        if self._sent > self._max_sent:
            self._last_dropped = self._entries.popleft().seq
            self._sent -= 1
        self._update()
        return None if self._last_received >= entry.implied_by else entry.message

    def rewind(self, seq: int) -> bool:
        """Go back to just after commit `seq`; return False if that is no longer kept."""
        if seq < self._last_dropped:
            return False
        self._last_received = seq
        self._sent = 0
        self._update()
        return True

    def _update(self) -> None:
        unsent = len(self._entries) - self._sent
        self._has_messages.set() if unsent else self._has_messages.clear()
        self._has_space.set() if unsent < self._max_unsent else self._has_space.clear()

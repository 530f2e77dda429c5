"""How the server parts from a client that sends far more than it may.

A message that is a little too long is read and refused like any other bad one. One that is far too long must not be
kept in memory; but if the server simply hung up, the client, still sending, would see a broken connection and no
reason.
"""

from __future__ import annotations

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import PayloadTooBig
from websockets.frames import Frame, Opcode

from simulmt.serve.protocol import Error, ErrorCode, write

TOO_BIG = Error(ErrorCode.TOO_BIG, "the message is far too long; send the text in smaller parts")


class LingeringProtocol(WebSocketsSansIOProtocol):
    """Says why it hangs up, and takes in what the client is still sending without keeping it."""

    _is_lingering = False

    def data_received(self, data: bytes) -> None:
        if not self._is_lingering:
            super().data_received(data)

    def handle_parser_exception(self) -> None:
        if not isinstance(self.conn.parser_exc, PayloadTooBig):
            super().handle_parser_exception()
            return
        self._is_lingering = self.close_sent = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": ErrorCode.TOO_BIG.failure.close_code})
        explanation = Frame(Opcode.TEXT, write(TOO_BIG).encode()).serialize(mask=False)
        self.transport.write(explanation + b"".join(self.conn.data_to_send()))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.close_timer = self.loop.call_later(self.close_timeout, self.transport.abort)

"""Headers that pika cannot decode, such as a time in milliseconds where seconds belong: beyond the year 9999.

pika drops the connection over them. The broker sends the message again over the next one, without end, and no other
message of any consumer gets through.
"""

import struct
from typing import Any

from pika import BasicProperties, SelectConnection
from pika.exceptions import InvalidFrameError
from pika.frame import Header
from pika.spec import FRAME_HEADER, FRAME_HEADER_SIZE

RAW = "x-penstock-headers"


class UnreadableHeaders(dict[str, Any]):
    """What is left of such headers: their bytes, so that nothing is lost, and why they could not be read."""

    def __init__(self, table: bytes, error: Exception) -> None:
        super().__init__({RAW: table})
        self.reason = f"its headers cannot be read: {type(error).__name__}: {error}"


class ForgivingConnection(SelectConnection):  # type: ignore[misc] # pika has no types
    """A connection that outlives them."""

    def _read_frame(self) -> Any:
        try:
            return super()._read_frame()
        except InvalidFrameError:
            raise
        except Exception as error:
            header = amqp_frame_without_headers(self._frame_buffer, error)
            if header is None:
                raise
            return header


def amqp_frame_without_headers(frame: bytes, error: Exception) -> tuple[int, Header] | None:
    """The size of a content header's frame and what it says but for its table of headers; None if it has none.

    The payload: class (2 bytes), weight (2), size of the body (8), then flags (2) and the properties that they name:
    content type and encoding (a length byte and text), then the table (4 bytes of length), then the others.
    """
    kind, channel, size = struct.unpack_from(">BHL", frame)
    payload = frame[FRAME_HEADER_SIZE : FRAME_HEADER_SIZE + size]
    if kind != FRAME_HEADER:
        return None
    (body_size,) = struct.unpack_from(">Q", payload, 4)
    (flags,) = struct.unpack_from(">H", payload, 12)
    if not flags & BasicProperties.FLAG_HEADERS:
        return None
    begin = 14
    for flag in (BasicProperties.FLAG_CONTENT_TYPE, BasicProperties.FLAG_CONTENT_ENCODING):
        if flags & flag:
            begin += 1 + payload[begin]
    (length,) = struct.unpack_from(">I", payload, begin)
    end = begin + 4 + length
    properties = BasicProperties()
    properties.decode(payload[12:begin] + bytes(4) + payload[end:])
    properties.headers = UnreadableHeaders(payload[begin + 4 : end], error)
    return FRAME_HEADER_SIZE + size + 1, Header(channel, body_size, properties)

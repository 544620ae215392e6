"""Content headers are read around the table that pika cannot decode."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pika import BasicProperties
from pika.frame import Body, Header

from penstock.consume.unreadable_headers import RAW, UnreadableHeaders, amqp_frame_without_headers

texts = st.none() | st.text(max_size=20)
settings = st.fixed_dictionaries(
    {"content_type": texts, "content_encoding": texts, "type": texts, "message_id": texts, "correlation_id": texts}
    | {"priority": st.none() | st.integers(0, 255), "delivery_mode": st.sampled_from([None, 1, 2])}
)


@given(settings, st.integers(0, 1 << 40), st.dictionaries(st.text(max_size=5), st.integers(0, 9), min_size=1))
def test_everything_but_the_table_is_read(said: dict[str, Any], body_size: int, headers: dict[str, int]) -> None:
    frame = Header(7, body_size, BasicProperties(headers=headers, **said)).marshal()

    size, header = amqp_frame_without_headers(frame + b"what follows", ValueError("why")) or (0, None)

    assert header is not None
    assert (size, header.channel_number, header.body_size) == (len(frame), 7, body_size)
    assert {name: getattr(header.properties, name) for name in said} == said
    assert isinstance(header.properties.headers, UnreadableHeaders)
    assert header.properties.headers[RAW] in frame
    assert len(header.properties.headers[RAW]) == sum(len(name.encode()) + 6 for name in headers)
    assert header.properties.headers.reason == "its headers cannot be read: ValueError: why"


def test_what_has_no_table_is_left_to_pika() -> None:
    assert amqp_frame_without_headers(Body(1, b"body").marshal(), ValueError()) is None
    assert amqp_frame_without_headers(Header(1, 4, BasicProperties(type="a")).marshal(), ValueError()) is None

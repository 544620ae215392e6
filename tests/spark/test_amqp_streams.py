"""Streams as logs, on a real broker and without a JVM: where they begin and end, ranges, loss, restarts."""

import logging
import threading
from collections.abc import Iterator

import pytest

from penstock.broker import Broker
from penstock.errors import BrokerError, ConfigError, StreamDataLost
from penstock.spark.amqp.stream_client import StreamClient
from penstock.spark.amqp.stream_link import PREFETCH
from penstock.spark.amqp.stream_options import MAX_OFFSETS, StreamSettings
from penstock.spark.amqp.stream_readers import (
    SMALLEST_RANGE,
    StreamFollower,
    StreamRange,
    StreamTable,
    shares_of_spark_batch,
    spark_stream_ranges,
)
from penstock.testing import wait_until
from tests.servers import RabbitMQ, free_port
from tests.spark.amqp_streams import SHORT_LIVED, Publisher

pytestmark = pytest.mark.server


@pytest.fixture
def publisher(shared_rabbitmq: RabbitMQ) -> Iterator[Publisher]:
    publisher = Publisher(shared_rabbitmq.url)
    yield publisher
    publisher.close()


@pytest.fixture
def client(shared_rabbitmq: RabbitMQ) -> Iterator[StreamClient]:
    client = StreamClient(Broker(shared_rabbitmq.url), timeout=20.0)
    yield client
    client.close()


def settings(url: str, streams: str, **options: str) -> StreamSettings:
    return StreamSettings({"url": url, "streams": streams, "timeout": "20s", **options})


def outlived(publisher: Publisher, client: StreamClient) -> str:
    """A stream of which retention has removed the beginning."""
    stream = publisher.declare(**SHORT_LIVED)
    for _ in range(8):
        publisher.fill(stream, 30, size=1000)
    wait_until(lambda: (client.earliest(stream) or 0) > 100)  # the broker does so when it finds the time
    return stream


def test_an_empty_stream_has_neither_beginning_nor_end(publisher: Publisher, client: StreamClient) -> None:
    stream = publisher.declare()

    assert client.earliest(stream, 0.2) is None
    assert client.latest(stream, 0.2) is None


def test_the_end_of_a_stream_is_exact_whatever_its_size(publisher: Publisher, client: StreamClient) -> None:
    stream = publisher.declare()
    for count in (1, 2, PREFETCH, 3 * PREFETCH):
        publisher.fill(stream, count)
        assert client.latest(stream) == len(publisher.published[stream])
    assert client.earliest(stream) == 0


def test_a_range_is_exactly_what_was_published(publisher: Publisher, client: StreamClient) -> None:
    stream = publisher.declare()
    publisher.fill(stream, 2 * PREFETCH)
    bodies = publisher.published[stream]

    for start, end in ((0, 2 * PREFETCH), (7, 8), (PREFETCH - 1, PREFETCH + 700), (5, 5)):
        found = list(client.read(stream, start, end))
        assert [delivery.offset for delivery in found] == list(range(start, end))
        assert [delivery.body for delivery in found] == bodies[start:end]


def test_a_range_below_the_retention_is_refused_with_the_stream_and_the_offsets(
    publisher: Publisher, client: StreamClient
) -> None:
    stream = outlived(publisher, client)
    reading = client.read(stream, 3, 100)

    with pytest.raises(StreamDataLost, match=rf"stream '{stream}' begins at offset \d+, but offsets 3 to \d+ were"):
        next(reading)


def test_without_fail_on_loss_what_is_lost_is_counted_and_the_rest_is_read(
    shared_rabbitmq: RabbitMQ, publisher: Publisher, client: StreamClient, caplog: pytest.LogCaptureFixture
) -> None:
    stream = outlived(publisher, client)
    lenient = StreamClient(Broker(shared_rabbitmq.url), fail_on_loss=False)
    end = lenient.latest(stream)
    assert end is not None
    with caplog.at_level(logging.WARNING):
        found = list(lenient.read(stream, 3, end))
    lenient.close()

    first = found[0].offset
    assert lenient.lost == first - 3 > 0
    assert f"Stream has lost messages. stream={stream} from=3 to={first - 1}" in caplog.text
    bodies = publisher.published[stream]
    assert [delivery.body for delivery in found] == bodies[len(bodies) - len(found) :]


def test_holes_in_the_offsets_are_no_loss(publisher: Publisher, client: StreamClient) -> None:
    # Every segment begins with a mark of the broker's own, which takes an offset.
    stream = publisher.declare(**{"x-stream-max-segment-size-bytes": 20_000})
    publisher.fill(stream, 100, size=1000)
    publisher.fill(stream, 100, size=1000)
    end = client.latest(stream)
    assert end is not None
    assert end > 200

    assert [delivery.body for delivery in client.read(stream, 0, end)] == publisher.published[stream]


def test_a_broker_that_restarts_in_the_middle_of_a_range_costs_and_repeats_nothing(rabbitmq: RabbitMQ) -> None:
    publisher = Publisher(rabbitmq.url)
    stream = publisher.declare()
    publisher.fill(stream, 5 * PREFETCH)
    client = StreamClient(Broker(rabbitmq.url), timeout=60.0)
    reading = client.read(stream, 0, 5 * PREFETCH)
    found = [next(reading).body for _ in range(PREFETCH)]
    rabbitmq.stop()
    again = threading.Thread(target=rabbitmq.start)
    again.start()
    found += [delivery.body for delivery in reading]
    again.join()
    assert client.latest(stream) == 5 * PREFETCH
    client.close()

    assert found == publisher.published[stream]


def test_a_broker_that_stays_away_is_named_without_its_password() -> None:
    port = free_port()
    client = StreamClient(Broker(f"amqp://me:secret@127.0.0.1:{port}/"), timeout=0.3)

    with pytest.raises(BrokerError, match=rf"amqp://127.0.0.1:{port}/ was away or silent for 0.3 s") as caught:
        client.latest("any")
    assert "secret" not in str(caught.value)


def test_what_cannot_be_read_is_said_at_once(
    shared_rabbitmq: RabbitMQ, publisher: Publisher, client: StreamClient
) -> None:
    publisher.channel.queue_declare("classic", auto_delete=True)
    publisher.channel.basic_publish("", "classic", b"precious")

    with pytest.raises(BrokerError, match=r"stream 'absent' .* 404 NOT_FOUND"):
        client.latest("absent")
    with pytest.raises(BrokerError, match=r"stream 'classic' .* cannot be read"):
        client.latest("classic")
    with pytest.raises(BrokerError, match="refuses the user or password"):
        StreamClient(Broker(shared_rabbitmq.url.replace("guest:guest", "guest:wrong"))).latest("absent")
    assert publisher.channel.queue_declare("classic", passive=True).method.message_count == 1


def test_a_stream_that_was_made_anew_is_refused_or_read_from_its_beginning(
    shared_rabbitmq: RabbitMQ, publisher: Publisher
) -> None:
    stream = publisher.declare()
    publisher.fill(stream, 50)
    follower = StreamFollower(settings(shared_rabbitmq.url, stream))
    limit = follower.getDefaultReadLimit()
    before = follower.latestOffset(follower.initialOffset(), limit)
    assert before == {stream: {"next": 50, "lost": 0}}
    publisher.channel.queue_delete(stream)
    publisher.declare_again(stream)
    publisher.fill(stream, 20)

    with pytest.raises(StreamDataLost, match="ends before offset 20, but offset 50 is the next"):
        follower.latestOffset(before, limit)
    follower.stop()
    lenient = StreamFollower(settings(shared_rabbitmq.url, stream, failOnDataLoss="false"))
    after = lenient.latestOffset(before, limit)
    lenient.stop()
    assert lenient.partitions(before, after) == [StreamRange(stream, 0, 20)]


def test_what_retention_took_before_a_batch_is_counted_in_its_offset(
    shared_rabbitmq: RabbitMQ, publisher: Publisher, client: StreamClient
) -> None:
    stream = outlived(publisher, client)
    follower = StreamFollower(settings(shared_rabbitmq.url, stream, failOnDataLoss="false"))
    start = {stream: {"next": 3, "lost": 10}}
    after = follower.latestOffset(start, follower.getDefaultReadLimit())
    follower.stop()

    first, end = 3 + after[stream]["lost"] - 10, after[stream]["next"]
    assert first > 3
    assert end == client.latest(stream)
    assert follower.partitions(start, after) == [StreamRange(stream, first, end)]
    strict = StreamFollower(settings(shared_rabbitmq.url, stream))
    with pytest.raises(StreamDataLost, match=f"stream '{stream}'"):
        strict.latestOffset(start, strict.getDefaultReadLimit())
    strict.stop()


def test_batches_are_limited_and_shared_by_the_streams(shared_rabbitmq: RabbitMQ, publisher: Publisher) -> None:
    long, short = publisher.declare(), publisher.declare()
    publisher.fill(long, 100)
    publisher.fill(short, 10)
    follower = StreamFollower(settings(shared_rabbitmq.url, f"{long}, {short}", maxOffsetsPerTrigger="40"))
    limit = follower.getDefaultReadLimit()
    first = follower.latestOffset(follower.initialOffset(), limit)
    second = follower.latestOffset(first, limit)
    follower.prepareForTriggerAvailableNow()
    publisher.fill(short, 10)
    third = follower.latestOffset(second, limit)
    follower.stop()

    assert first == {long: {"next": 30, "lost": 0}, short: {"next": 10, "lost": 0}}
    assert second == {long: {"next": 70, "lost": 0}, short: {"next": 10, "lost": 0}}
    assert third == {long: {"next": 100, "lost": 0}, short: {"next": 10, "lost": 0}}
    assert follower.reportLatestOffset() == third
    assert follower.partitions(first, second) == [StreamRange(long, 30, 70)]


def test_a_table_is_what_lies_between_two_offsets(shared_rabbitmq: RabbitMQ, publisher: Publisher) -> None:
    stream = publisher.declare()
    publisher.fill(stream, 20)
    url = shared_rabbitmq.url

    def planned(**options: str) -> list[StreamRange]:
        return list(StreamTable(settings(url, stream, **options)).partitions())  # type: ignore[arg-type]

    assert planned() == [StreamRange(stream, 0, 20)]
    assert planned(startingOffsets="latest") == [StreamRange("", 0, 0)]
    places = f'{{"{stream}": 5}}', f'{{"{stream}": 9}}'
    assert planned(startingOffsets=places[0], endingOffsets=places[1]) == [StreamRange(stream, 5, 9)]
    with pytest.raises(ConfigError, match="endingOffsets says 21 for stream"):
        planned(endingOffsets=f'{{"{stream}": 21}}')


def test_ranges_are_even_and_worth_a_task() -> None:
    assert spark_stream_ranges("s", 0, 100, 8) == [StreamRange("s", 0, 100)]
    assert spark_stream_ranges("s", 10, 10 + 3 * SMALLEST_RANGE, 2) == [
        StreamRange("s", 10, 10 + 3 * SMALLEST_RANGE // 2),
        StreamRange("s", 10 + 3 * SMALLEST_RANGE // 2, 10 + 3 * SMALLEST_RANGE),
    ]
    assert spark_stream_ranges("s", 4, 4, 2) == []


@pytest.mark.parametrize(
    ("backlogs", "limit", "taken"),
    [
        ({"a": 5, "b": 100}, 20, {"a": 5, "b": 15}),
        ({"a": 100, "b": 100}, 20, {"a": 10, "b": 10}),
        ({"a": 100, "b": 100}, 1, {"a": 1, "b": 0}),
        ({"a": 0, "b": 0}, 20, {"a": 0, "b": 0}),
        ({"a": 3, "b": 4}, MAX_OFFSETS, {"a": 3, "b": 4}),
    ],
)
def test_a_limit_is_shared_evenly_and_wholly_used(backlogs: dict[str, int], limit: int, taken: dict[str, int]) -> None:
    assert shares_of_spark_batch(backlogs, limit) == taken


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"streams": "s"}, r"needs option\('url'\)"),
        ({"url": "amqp://h/"}, r"needs option\('streams'\)"),
        ({"url": "amqp://h/", "streams": " , "}, r"needs option\('streams'\)"),
        ({"url": "http://me:secret@h/", "streams": "s"}, "url must look like amqp://"),
        ({"url": "amqp://h/", "streams": "s", "startingOffsets": "now"}, "startingOffsets must be earliest, latest or"),
        ({"url": "amqp://h/", "streams": "s", "startingOffsets": '{"s": -1}'}, "startingOffsets must be"),
        ({"url": "amqp://h/", "streams": "s,t", "startingOffsets": '{"s": 1}'}, "must name exactly the streams s, t"),
        ({"url": "amqp://h/", "streams": "s", "endingOffsets": "earliest"}, "endingOffsets must be latest or JSON"),
        ({"url": "amqp://h/", "streams": "s", "maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger must be a whole"),
        ({"url": "amqp://h/", "streams": "s", "failOnDataLoss": "no"}, "failOnDataLoss must be true or false"),
        ({"url": "amqp://h/", "streams": "s", "timeout": "long"}, "timeout must be a duration"),
        ({"url": "amqp://h/", "streams": "s", "caFile": "x"}, "tls is set, but the url says amqp://"),
        ({"url": "amqp://h/", "streams": "s", "strems": "x"}, "option 'strems' is unknown"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_name(options: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        StreamSettings(options)
    assert "secret" not in str(caught.value)

"""`format("penstock-amqp")` in Spark, on a real broker: every message once, over batches and restarts."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pika
import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock.spark.amqp.stream_readers import ROWS
from penstock.spark.amqp.stream_source import SCHEMA
from tests.servers import RabbitMQ
from tests.spark.amqp_streams import SHORT_LIVED, Publisher
from tests.spark.pipeline import patiently

pytestmark = [pytest.mark.spark, pytest.mark.server]


@pytest.fixture
def publisher(shared_rabbitmq: RabbitMQ) -> Iterator[Publisher]:
    publisher = Publisher(shared_rabbitmq.url)
    yield publisher
    publisher.close()


class Follower:
    """A query that keeps what it reads, started as often as a test likes."""

    def __init__(self, spark: SparkSession, url: str, streams: str, folder: Path) -> None:
        self._spark = spark
        self._options = {"url": url, "streams": streams, "timeout": "30s"}
        self._checkpoint = str(folder / "checkpoint")
        self.bodies: list[bytes] = []
        self.batches: list[int] = []

    def run(self, fail_after: int | None = None, **options: str) -> dict[str, Any]:
        """Work off what is there; where Spark's log says it ended."""

        def keep(rows: DataFrame, number: int) -> None:
            found = rows.orderBy("stream", "offset").toArrow()["body"].to_pylist()
            if fail_after is not None and number >= fail_after:
                raise RuntimeError("power cut")
            self.bodies += found
            self.batches.append(len(found))

        rows = self._spark.readStream.format("penstock-amqp").options(**self._options, **options).load()
        writing = rows.writeStream.foreachBatch(keep).option("checkpointLocation", self._checkpoint)
        query = patiently(writing.trigger(availableNow=True).start)
        end: dict[str, Any] = json.loads(query.lastProgress["sources"][0]["endOffset"]) if query.lastProgress else {}
        return end


def test_the_source_declares_exactly_the_schema_of_its_rows(spark: SparkSession) -> None:
    empty = spark.createDataFrame([], SCHEMA).toArrow()
    assert empty.schema.names == ROWS.names
    assert [str(field.type) for field in empty.schema] == [str(field.type) for field in ROWS]


def test_a_table_has_the_messages_as_they_were_published(
    spark: SparkSession, shared_rabbitmq: RabbitMQ, publisher: Publisher
) -> None:
    stream = publisher.declare()
    publisher.channel.exchange_declare("events", auto_delete=True)
    publisher.channel.queue_bind(stream, "events", "order.created")
    headers = {"tenant": "ü", "n": 3, "on": True, "raw": b"\xff", "at": datetime(2026, 1, 2), "nothing": None}
    wanted = pika.BasicProperties(
        content_type="application/json", type="order", message_id="m1", priority=4, timestamp=1_790_000_000,
        delivery_mode=2, headers=headers,
    )  # fmt: skip
    publisher.channel.basic_publish("events", "order.created", b'{"id": 1}', wanted)
    publisher.publish(stream, b"\xff\x00")
    reading = spark.read.format("penstock-amqp").option("url", shared_rabbitmq.url).option("streams", stream)
    full, plain = reading.load().orderBy("offset").collect()

    assert (full.stream, full.offset, full.exchange, full.routing_key) == (stream, 0, "events", "order.created")
    assert full.timestamp.astimezone(UTC) == datetime.fromtimestamp(1_790_000_000, UTC)
    assert full.properties == {
        "content_type": "application/json", "type": "order", "message_id": "m1", "priority": "4", "delivery_mode": "2",
    }  # fmt: skip
    assert full.headers == {
        "tenant": "ü", "n": "3", "on": "true", "raw": "\ufffd", "at": "2026-01-02T00:00:00+00:00", "nothing": None,
    }  # fmt: skip
    assert bytes(full.body) == b'{"id": 1}'
    assert (plain.offset, plain.timestamp, plain.headers, plain.routing_key) == (1, None, {}, stream)
    assert bytes(plain.body) == b"\xff\x00"


def test_every_message_comes_once_over_batches_a_crash_and_a_restart(
    spark: SparkSession, shared_rabbitmq: RabbitMQ, publisher: Publisher, tmp_path: Path
) -> None:
    one, two = publisher.declare(), publisher.declare()
    publisher.fill(one, 12_000)
    publisher.fill(two, 300)
    follower = Follower(spark, shared_rabbitmq.url, f"{one},{two}", tmp_path)
    with pytest.raises(Exception, match="power cut"):
        follower.run(fail_after=1, maxOffsetsPerTrigger="6000")
    publisher.fill(one, 500)
    end = follower.run(maxOffsetsPerTrigger="6000")

    assert follower.batches[0] == 6000
    assert sum(follower.batches) == 12_800
    assert sorted(follower.bodies) == sorted(publisher.published[one] + publisher.published[two])
    assert end == {one: {"next": 12_500, "lost": 0}, two: {"next": 300, "lost": 0}}


def test_what_retention_removed_stops_a_query_unless_it_may_lose_it(
    spark: SparkSession, shared_rabbitmq: RabbitMQ, publisher: Publisher, tmp_path: Path
) -> None:
    stream = publisher.declare(**SHORT_LIVED)
    publisher.fill(stream, 10, size=1000)
    follower = Follower(spark, shared_rabbitmq.url, stream, tmp_path)
    follower.run()
    for _ in range(6):
        publisher.fill(stream, 30, size=1000)
    with pytest.raises(Exception, match=rf"StreamDataLost: stream '{stream}' begins at offset \d+, but offsets 10 to"):
        follower.run()
    end = follower.run(failOnDataLoss="false")[stream]

    published = publisher.published[stream]
    rest = len(follower.bodies) - 10
    assert follower.bodies == published[:10] + published[-rest:]
    # Offsets count the broker's own marks too: at most as many were lost as the offset says.
    assert len(published) <= len(follower.bodies) + end["lost"] <= end["next"]


def test_an_option_that_makes_no_sense_fails_the_query_with_its_name(spark: SparkSession) -> None:
    with pytest.raises(Exception, match="option 'strems' is unknown to penstock-amqp"):
        spark.read.format("penstock-amqp").option("strems", "x").load().collect()

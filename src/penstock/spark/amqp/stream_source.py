"""`format("penstock-amqp")`: RabbitMQ streams as a streaming source and as a table.

    spark.readStream.format("penstock-amqp").option("url", "amqp://host/").option("streams", "orders,clicks").load()
    spark.read.format("penstock-amqp").option("url", "amqp://host/").option("streams", "orders").load()

    url                      amqp:// or amqps://, the virtual host as its path
    usernameFile passwordFile    files with the credentials, read at each connect; they come before those of the url
    caFile certFile keyFile serverName    for amqps://
    streams                  names, separated by commas
    startingOffsets          earliest (default), latest, or JSON like {"orders": 1200}; for a new query, or a table
    endingOffsets            for a table: latest (default) or JSON like {"orders": 9000}, up to before that offset
    maxOffsetsPerTrigger     how much one batch takes at most (1000000), shared by the streams
    failOnDataLoss           true (default): refuse to go on if retention removed what was not read; false: count it
    timeout                  how long the broker may be away or silent, like 90s (60s)
    tasks                    how many tasks read a batch (as many as this machine has cores)

The driver plans ranges of offsets; tasks attach to the stream at the start of theirs. Needs the extra `[amqp]`.
"""

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.spark.amqp.stream_readers import StreamFollower, StreamTable

# The schema `readers.ROWS`, in Spark's words; a test holds the two together.
SCHEMA = (
    "stream string, offset bigint, timestamp timestamp, exchange string, routing_key string, "
    "properties map<string,string>, headers map<string,string>, body binary"
)


class StreamSource(DataSource):
    """The streams that `option("streams")` names."""

    @classmethod
    def name(cls) -> str:
        return "penstock-amqp"

    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: StructType) -> "StreamTable":
        from penstock.spark.amqp.stream_options import (
            StreamSettings,  # here, so that without pika there is a reason to read
        )
        from penstock.spark.amqp.stream_readers import StreamTable

        return StreamTable(StreamSettings(self.options))

    def streamReader(self, schema: StructType) -> "StreamFollower":  # noqa: N802 - Spark's name
        from penstock.spark.amqp.stream_options import StreamSettings
        from penstock.spark.amqp.stream_readers import StreamFollower

        settings = StreamSettings(self.options)
        if settings.ending is not None:
            raise ConfigError("endingOffsets is for spark.read: a streaming query has no end")
        return StreamFollower(settings)

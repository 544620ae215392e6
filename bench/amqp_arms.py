"""The arms of `bench.amqp`: each consumes N messages from a filled queue in a process of its own and says how it went.

python -m bench.amqp_arms ARM '{"url": ..., "queue": ..., "messages": ..., "sleep": ..., ...}'
"""

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pika


class Meter:
    """Counts handled messages; all clients pay the same for it."""

    def __init__(self, messages: int, sleep: float) -> None:
        self.messages = messages
        self.sleep = sleep
        self.done = threading.Event()
        self.ack_frames: int | None = None
        self.settle: list[float] = []
        self.seconds: list[float] = []
        self._first = 0.0
        self._cpu = 0.0

    def begin(self) -> float:
        now = time.perf_counter()
        if not self._first:
            self._first, self._cpu = now, time.process_time()
        return now

    def end(self, begun: float) -> None:
        now = time.perf_counter()
        self.seconds.append(now - begun)
        if len(self.seconds) == self.messages:
            self._last = now
            self.done.set()

    def handle(self, message: object) -> None:
        begun = self.begin()
        if self.sleep:
            time.sleep(self.sleep)
        self.end(begun)

    async def handle_async(self, message: object) -> None:
        begun = self.begin()
        if self.sleep:
            await asyncio.sleep(self.sleep)
        self.end(begun)

    def report(self) -> dict[str, Any]:
        cpu = time.process_time() - self._cpu
        return {
            "rate": self.messages / (self._last - self._first),
            "handler_p95_ms": p95(self.seconds) * 1000,
            "settle_p95_ms": p95(self.settle) * 1000 if self.settle else None,
            "ack_frames": self.ack_frames,
            "cpu_us": cpu / self.messages * 1e6,
            "rss_mb": peak_memory() / 1e6,
        }


def peak_memory() -> int:
    """The most that this process has had resident. (getrusage would count what its parent had before it, too.)"""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def p95(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.95)]


def plain_pika(meter: Meter, url: str, queue: str, prefetch: int, every: int) -> None:
    """A loop on pika's fastest connection, with no threads: the handler runs where the socket is read."""
    frames = 0

    def opened(channel: Any) -> None:
        channel.basic_qos(
            prefetch_count=prefetch, callback=lambda _: channel.basic_consume(queue, on_message_callback=deliver)
        )

    def deliver(channel: Any, method: Any, properties: Any, body: bytes) -> None:
        nonlocal frames
        meter.handle(body)
        count = len(meter.seconds)
        if count % every == 0 or count == meter.messages:
            channel.basic_ack(method.delivery_tag, multiple=every > 1)
            frames += 1
        if count == meter.messages:
            connection.close()

    connection = pika.SelectConnection(
        pika.URLParameters(url),
        on_open_callback=lambda it: it.channel(on_open_callback=opened),
        on_close_callback=lambda it, _: it.ioloop.stop(),
    )
    connection.ioloop.start()
    meter.ack_frames = frames


def penstock(meter: Meter, url: str, queue: str, workers: int, prefetch: Any, execution: str, settle: bool) -> None:
    from penstock.amqp import ConsumerRegistry, Declarations
    from penstock.consume.subscription import Subscription

    declarations = Declarations()
    declarations.queue(queue)
    handler = meter.handle_async if execution == "async" else meter.handle
    declarations.consumer(queue=queue, handler=handler, workers=workers, prefetch=prefetch, execution=execution)
    received: dict[int, float] = {}
    if settle:
        on_delivery = Subscription.on_delivery

        def noted(self: Subscription, channel: Any, method: Any, properties: Any, body: bytes) -> None:
            if not received:
                channel.basic_ack = _timed(channel.basic_ack, received, meter.settle)
            received[method.delivery_tag] = time.perf_counter()
            on_delivery(self, channel, method, properties, body)

        Subscription.on_delivery = noted  # type: ignore[method-assign]
    registry = ConsumerRegistry(url, declarations)
    registry.start()
    meter.done.wait()
    while registry.stats().consumers[queue].in_flight:
        time.sleep(0.001)
    registry.stop(5)
    meter.ack_frames = registry.stats().consumers[queue].ack_frames


def _timed(ack: Callable[..., None], received: dict[int, float], settle: list[float]) -> Callable[..., None]:
    """Note how long the messages that an ack covers were with us, from delivery to the frame itself."""

    def timed(tag: int, multiple: bool = False) -> None:
        ack(tag, multiple=multiple)
        now = time.perf_counter()
        covered = [one for one in received if one <= tag] if multiple else [tag]
        settle.extend(now - received.pop(one) for one in covered)

    return timed


def aio_pika(meter: Meter, url: str, queue: str, prefetch: int) -> None:
    import aio_pika

    async def run() -> None:
        finished = asyncio.Event()

        async def on_message(message: Any) -> None:
            async with message.process():
                await meter.handle_async(message)
            if len(meter.seconds) == meter.messages:
                finished.set()

        connection = await aio_pika.connect_robust(url)
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=prefetch)
        source = await channel.declare_queue(queue, durable=True)
        await source.consume(on_message)
        await finished.wait()
        await connection.close()

    asyncio.run(run())
    meter.ack_frames = meter.messages


def faststream(meter: Meter, url: str, queue: str, prefetch: int) -> None:
    from faststream.rabbit import Channel, RabbitBroker, RabbitQueue

    async def run() -> None:
        finished = asyncio.Event()
        broker = RabbitBroker(url, default_channel=Channel(prefetch_count=prefetch), logger=None)

        @broker.subscriber(RabbitQueue(queue, durable=True))  # type: ignore[untyped-decorator, unused-ignore]
        async def on_message(body: bytes) -> None:
            await meter.handle_async(body)
            if len(meter.seconds) == meter.messages:
                finished.set()

        await broker.start()
        await finished.wait()
        await broker.stop()

    asyncio.run(run())
    meter.ack_frames = meter.messages


def dramatiq(meter: Meter, url: str, queue: str, workers: int) -> None:
    import dramatiq as library
    from dramatiq.brokers.rabbitmq import RabbitmqBroker

    broker = RabbitmqBroker(url=url)
    library.set_broker(broker)

    @library.actor(queue_name=queue, actor_name="handle")
    def handle(body: str) -> None:
        meter.handle(body)

    worker = library.Worker(broker, worker_threads=workers)
    worker.start()
    meter.done.wait()
    worker.stop()
    broker.close()
    meter.ack_frames = meter.messages


def main(arm: str, settings: dict[str, Any]) -> None:
    meter = Meter(settings.pop("messages"), settings.pop("sleep"))
    arms: dict[str, Callable[..., None]] = {
        "plain_pika": plain_pika,
        "penstock": penstock,
        "aio_pika": aio_pika,
        "faststream": faststream,
        "dramatiq": dramatiq,
    }
    arms[arm](meter, **settings)
    print(json.dumps(meter.report()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))

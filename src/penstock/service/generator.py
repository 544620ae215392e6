"""Realistic telemetry for the demo: a shop's services over a day and a half, with a rush hour and one bad deployment.

The same seed gives the same points. Chunks come in the order of time, a few of them late, as they do in real life.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.model.point import Chunk, chunk_type, entity_of

DURATION = "http.server.request.duration"
CPU = "process.cpu.utilization"
QUERY = "db.query.duration"

SERVICES = {
    "checkout": ("POST /orders", "GET /orders/{id}", "POST /payments"),
    "catalogue": ("GET /products", "GET /products/{id}", "GET /search"),
    "accounts": ("POST /login", "GET /profile"),
    "shipping": ("GET /rates", "POST /labels"),
}
STATEMENTS = ("SELECT orders", "INSERT orders", "SELECT products", "UPDATE stock", "SELECT accounts")
MINUTES_PER_CHUNK = 10
BAD_DEPLOYMENT = ("checkout", 26 * 60, 27 * 60)  # service, from and to, in minutes after the start


@dataclass(frozen=True, slots=True)
class DemoDay:
    """How much there is to generate."""

    points: int = 600_000
    minutes: int = 36 * 60
    seed: int = 7


def generate_demo_points(day: DemoDay, end: float) -> Iterator[Chunk]:
    """About `day.points` points in chunks, the last of them at `end` seconds since the epoch."""
    rng = random.Random(day.seed)
    start = int(end // 60 * 60) - day.minutes * 60
    late: list[Chunk] = []
    series = _series()
    # Averaged over the day the load is 0.7; each metric gets a third of the points.
    per_minute = {metric: day.points / 3 / day.minutes / len(members) / 0.7 for metric, members in series.items()}
    for minute in range(0, day.minutes, MINUTES_PER_CHUNK):
        load = 0.4 + 0.6 * math.sin(math.pi * ((minute / 60) % 24) / 24) ** 2
        for metric in (DURATION, CPU, QUERY):
            columns: tuple[list[str], list[int], list[float]] = ([], [], [])
            for service, entity in series[metric]:
                count = max(1, round(per_minute[metric] * MINUTES_PER_CHUNK * load))
                _fill(columns, rng, metric, service, entity, start, minute, count, load)
            chunk = chunk_type(metric).of(*columns)
            # A collector that was cut off for a while delivers afterwards: one chunk in fifty comes hours late.
            if rng.random() < 0.02:
                late.append(chunk)
            else:
                yield chunk
    yield from late


def _series() -> dict[str, list[tuple[str, str]]]:
    return {
        DURATION: [
            (service, entity_of({"service": service, "endpoint": endpoint}))
            for service, endpoints in SERVICES.items()
            for endpoint in endpoints
        ],
        CPU: [(service, entity_of({"service": service})) for service in SERVICES],
        QUERY: [
            (service, entity_of({"service": service, "statement": statement}))
            for service in SERVICES
            for statement in STATEMENTS
        ],
    }


def _fill(
    columns: tuple[list[str], list[int], list[float]],
    rng: random.Random,
    metric: str,
    service: str,
    entity: str,
    start: int,
    minute: int,
    count: int,
    load: float,
) -> None:
    """Add `count` points of one series, spread over the minutes of one chunk."""
    entities, times, values = columns
    sick, sick_from, sick_to = BAD_DEPLOYMENT
    slow = 6.0 if service == sick and sick_from <= minute < sick_to else 1.0
    for _ in range(count):
        second = (minute + rng.random() * MINUTES_PER_CHUNK) * 60
        entities.append(entity)
        times.append(int((start + second) * 1_000_000))
        if metric == CPU:
            values.append(min(1.0, max(0.0, rng.gauss(0.2 + 0.5 * load, 0.08))))
        elif metric == QUERY:
            values.append(rng.lognormvariate(1.2, 0.9) * slow)
        else:
            values.append(rng.lognormvariate(3.2, 0.6) * (0.7 + load) * slow)

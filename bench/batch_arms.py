"""The arms of the batch queue's benchmark."""

import queue
import statistics
from collections.abc import Callable

from bench.batch_rigs import (
    TYPES,
    Empty,
    Held,
    Rate,
    Rig,
    batch_handles,
    cpu_per_call,
    handles,
    many,
    one_thread,
    run_rig,
    single,
    skewed_items,
    standard_queue,
)

# These know nothing of the package.
STANDARD: dict[str, Callable[[float], Rate]] = {
    "queue.Queue, one thread": lambda seconds: one_thread(queue.Queue(2_000), seconds),
    "queue.Queue 16p/4t": standard_queue,
}
OURS: dict[str, Callable[[float], Rate]] = {
    "16p/4t single": lambda seconds: run_rig(rig := Rig(4), 16, seconds, single(rig)),
    "16p/4t single, producer handles": lambda seconds: run_rig(rig := Rig(4), 16, seconds, handles(rig)),
    "16p/4t many of one type": lambda seconds: run_rig(rig := Rig(4), 16, seconds, many(rig, mixed=False)),
    "16p/4t many of one type, batch handles": lambda seconds: run_rig(rig := Rig(4), 16, seconds, batch_handles(rig)),
    "16p/4t many of one type, buffers of 20 000": lambda seconds: run_rig(
        rig := Rig(4, buffer_size=20_000), 16, seconds, many(rig, mixed=False)
    ),
    "16p/4t many of mixed types": lambda seconds: run_rig(rig := Rig(4), 16, seconds, many(rig, mixed=True)),
    "1p/1t single": lambda seconds: run_rig(rig := Rig(1), 1, seconds, single(rig)),
    "1p/1t single, producer handles": lambda seconds: run_rig(rig := Rig(1), 1, seconds, handles(rig)),
    "1p/1t single, one type": lambda seconds: run_rig(rig := Rig(1, TYPES[:1]), 1, seconds, single(rig, one_type=True)),
    "1p/1t many of one type": lambda seconds: run_rig(rig := Rig(1), 1, seconds, many(rig, mixed=False)),
    "1p/1t many of one type, batch handles": lambda seconds: run_rig(rig := Rig(1), 1, seconds, batch_handles(rig)),
}


def beside_s(arm: str, seconds: float) -> tuple[Rate, Rate]:
    """The rate of `arm`, and of S just before and after it: the speed of a core may change by half within seconds."""
    before = one_thread(queue.SimpleQueue(), seconds / 4)
    rate = (OURS | STANDARD)[arm](seconds)
    after = one_thread(queue.SimpleQueue(), seconds / 4)
    return rate, Rate((before.wall + after.wall) / 2, (before.cpu + after.cpu) / 2)


def anatomy_of_produce() -> dict[str, float]:
    """Nanoseconds of CPU time of a single `produce`: 4 000 items go in while the thread is held, then out."""
    items = skewed_items(1)
    rig = Rig(1)
    hold = Held(rig.queue)
    emits: dict[type, Callable[[object], bool]] = {type_: rig.queue.producer(type_) for type_ in TYPES}
    produce, handle, drain = [], [], []
    for _ in range(50):
        with hold:
            produce.append(cpu_per_call([rig.queue.produce] * len(items), items))
        drain.append(hold.drained_in / len(items) * 1e9)
        with hold:
            handle.append(cpu_per_call([emits[type(item)] for item in items], items))
    rig.close(100 * len(items))
    return {
        "SimpleQueue put + get (1 / S)": 1e9 / one_thread(queue.SimpleQueue(), 0.5).cpu,
        "loop and call of an empty method": cpu_per_call([Empty().produce] * len(items), items),
        "produce": statistics.median(produce),
        "a producer handle": statistics.median(handle),
        "drain and dispatch, 40 items per batch": statistics.median(drain),
    }

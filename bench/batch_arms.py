"""What the benchmark measures of each build of the package, and the processes that have one build each.

python -m bench.batch_arms        serves: a line `["16p/4t single", 1.0]` is answered by its figures
"""

import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from tests.builds import ROOT, build_wheel, unpacked, why_not_compiled

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
from penstock.batch.producing import COMPILED

PURE = "pure Python"

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


def anatomy() -> dict[str, float]:
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


class Build:
    """A process that has the package from `folder`."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.batch_arms", name],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def rate(self, arm: str, seconds: float) -> tuple[Rate, Rate]:
        """Of `arm`, and of S beside it."""
        rate, yardstick = self._ask(arm, seconds)
        return Rate(*rate), Rate(*yardstick)

    def anatomy(self) -> dict[str, float]:
        figures: dict[str, float] = self._ask("anatomy", 0)
        return figures

    def _ask(self, arm: str, seconds: float) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([arm, seconds]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the process of the {self.name} build has ended: see above"
        return json.loads(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()


@contextmanager
def builds() -> Iterator[list[Build]]:
    """The package as a wheel has it where there is a compiler, and as it is anywhere else."""
    with ExitStack() as stack:
        found = [stack.enter_context(Build(PURE, ROOT / "src"))]
        reason = why_not_compiled()
        if reason is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            found.insert(0, stack.enter_context(Build("compiled", unpacked(build_wheel(folder, compiled=True)))))
        else:
            print(f"No compiled build: {reason}.")
        yield found


def serve() -> None:
    build = sys.argv[1]
    assert ("compiled" if COMPILED else PURE) == build, "another build of the package came first on the path"
    for line in sys.stdin:
        arm, seconds = json.loads(line)
        if arm == "anatomy":
            print(json.dumps(anatomy()), flush=True)
        else:
            print(json.dumps([[rate.wall, rate.cpu] for rate in beside_s(arm, seconds)]), flush=True)


if __name__ == "__main__":
    serve()

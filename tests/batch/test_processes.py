"""Forks, interpreter exit and Ctrl-C, each in a process of its own: nothing is lost, nothing hangs."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PRELUDE = """
import os, signal, sys, threading, time
import penstock
from penstock import BatchQueue, BatchQueueConfig, PartitionPolicy, ThreadPolicy
from penstock.testing import wait_until
class A: pass
class B: pass
seen = []
def queue_of(**settings):
    settings.setdefault("threads", ThreadPolicy.fixed(2))
    settings.setdefault("partitions", PartitionPolicy.fixed(2))
    queue = penstock.queues.create("test", BatchQueueConfig(**settings))
    if not queue.config.consumer:
        queue.add_handler(A, seen.extend)
        queue.add_handler(B, seen.extend)
    return queue
"""


def run(program: str, tmp_path: Path, **options: float) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "program.py"
    script.write_text(PRELUDE + program)
    return subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=options.get("timeout", 30), check=False
    )


def test_what_is_held_is_consumed_before_the_interpreter_ends(tmp_path: Path) -> None:
    ran = run(
        """
class Slow:
    def __init__(self): self.count = 0
    def consume(self, batch):
        time.sleep(0.01)
        self.count += len(batch)
    def on_idle(self):
        print(self.count, flush=True)
queue_of(consumer=Slow(), threads=ThreadPolicy.fixed(1), partitions=PartitionPolicy.fixed(1), max_batch=100,
         min_idle=30.0, max_idle=30.0).produce_many([A() for _ in range(1000)])
""",
        tmp_path,
    )

    assert (ran.returncode, ran.stdout.split()[-1], ran.stderr) == (0, "1000", "")


def test_a_handler_that_hangs_does_not_keep_the_interpreter_from_ending(tmp_path: Path) -> None:
    ran = run(
        """
entered = threading.Event()
def hang(batch):
    entered.set()
    threading.Event().wait()
queue = queue_of(consumer=hang, shutdown_timeout=0.2)
queue.produce(A())
assert entered.wait(10)
print("end")
""",
        tmp_path,
    )

    assert ran.returncode == 0
    assert ran.stdout == "end\n"
    assert "did not drain in time" in ran.stderr


def test_ctrl_c_ends_a_blocked_producer_and_the_process(tmp_path: Path) -> None:
    ran = run(
        """
entered = threading.Event()
release = threading.Event()
def hold(batch):
    entered.set()
    release.wait(20)
queue = queue_of(consumer=hold, buffer_size=1, threads=ThreadPolicy.fixed(1), partitions=PartitionPolicy.fixed(1))
queue.produce(A())
assert entered.wait(10)
queue.produce(A())
def interrupt():
    wait_until(lambda: queue._layout.partitions[0]._waiters)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    queue.produce(A())
except KeyboardInterrupt:
    print("interrupted", bool(queue._layout.partitions[0]._waiters), flush=True)
    release.set()
print(queue.close(), queue.stats().types[object].consumed)
""",
        tmp_path,
    )

    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "interrupted False\nTrue 2\n", "")


@pytest.mark.parametrize(
    ("produce", "most", "settings"),
    [
        ("queue.produce(A())", 1, "buffer_size=5000"),
        ("queue.producer(A)(A())", 1, "buffer_size=5000"),
        ("queue.produce_many([A() for _ in range(10)])", 10, "buffer_size=64"),
        ("queue.batch_producer(A)([A() for _ in range(10)])", 10, "buffer_size=64"),
        ("queue.produce_many([A(), B()] * 5)", 10, "buffer_size=5000"),
        ("queue.produce_many([A() for _ in range(10)])", 10, "buffer_bytes=64, size_of=lambda item: 7"),
    ],
)
def test_a_storm_of_interrupts_leaves_a_queue_that_works_and_closes(
    tmp_path: Path, produce: str, most: int, settings: str
) -> None:
    """Interrupts hit the producer wherever they can; what was answered True is consumed, and closing is prompt."""
    ran = run(
        f"""
class Interrupt(Exception): pass
INSIDE = ("batch/producing.py", "batch/queue.py", "batch/admission.py", "batch/partition.py", "batch/waiting.py")
def interrupt(number, frame):
    while frame is not None:  # only what is inside the queue is to be hit
        if frame.f_code.co_filename.endswith(INSIDE):
            raise Interrupt
        frame = frame.f_back
signal.signal(signal.SIGALRM, interrupt)
queue = queue_of({settings})
accepted = interrupts = 0
deadline = time.monotonic() + 0.4
signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
while time.monotonic() < deadline or interrupts <= 20:  # on a busy machine there are fewer of them
    try:
        answer = {produce}
        accepted += answer
    except Interrupt:
        interrupts += 1
signal.setitimer(signal.ITIMER_REAL, 0)
started = time.monotonic()
closed = queue.close(timeout=20.0)
took = time.monotonic() - started
assert closed and took < 10, (closed, took)
# An interrupt between the append and the count leaves items that were consumed, though their producer was not told.
assert accepted <= len(seen) <= accepted + {most} * interrupts, (accepted, len(seen), interrupts)
print("fine")
""",
        tmp_path,
    )

    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "fine\n", "")


@pytest.mark.parametrize(
    "settings",
    ["", "shared_scheduler=('io', ThreadPolicy.fixed(2)), threads=None", "consumer=seen.extend, buffer_size=5000"],
)
def test_the_child_of_a_fork_has_an_empty_queue_that_works(tmp_path: Path, settings: str) -> None:
    ran = run(
        f"""
queue = queue_of({settings})
queue.produce(A())
wait_until(lambda: len(seen) == 1)
stopping = threading.Event()
def busy():
    while not stopping.is_set():
        queue.produce(A())
threads = [threading.Thread(target=busy) for _ in range(3)]
for thread in threads: thread.start()
for _ in range(5):  # whatever the producers and the drain threads are in the middle of
    child = os.fork()
    if child == 0:
        seen.clear()
        assert queue.stats().total_used == 0
        assert queue.produce_many([A() for _ in range(500)]) == 500
        for _ in range(500): assert queue.produce(A())
        wait_until(lambda: len(seen) == 1000)
        assert queue.close()
        os._exit(7 if len(seen) == 1000 else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7, status
stopping.set()
for thread in threads: thread.join()
assert penstock.queues.shutdown_all()
print("fine")
""",
        tmp_path,
        timeout=60,
    )

    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "fine\n", "")


@pytest.mark.parametrize("settings", ["", "threads=None, shared_scheduler=('io', ThreadPolicy.fixed(2))"])
def test_a_thread_that_could_not_be_started_is_started_by_the_next_item(tmp_path: Path, settings: str) -> None:
    ran = run(
        f"""
from penstock.batch.scheduler import DrainThread
queue = queue_of({settings})
child = os.fork()
if child == 0:
    start = DrainThread.start
    def no_more(thread): raise RuntimeError("can't start new thread")
    DrainThread.start = no_more
    refusals = []
    for _ in range(2):
        try:
            queue.produce(A())
        except RuntimeError as error:
            refusals.append(str(error))
    DrainThread.start = start
    answer = queue.produce(A())
    print(refusals, answer, queue.close(), len(seen), flush=True)
    os._exit(0)
os.waitpid(child, 0)
""",
        tmp_path,
    )

    assert ran.stdout == str(["can't start new thread"] * 2) + " True True 3\n", ran.stderr


def test_the_parent_keeps_what_it_held_when_it_forked(tmp_path: Path) -> None:
    ran = run(
        """
entered, release = threading.Event(), threading.Event()
def hold(batch):
    entered.set()
    release.wait(20)
    seen.extend(batch)
queue = queue_of(consumer=hold, threads=ThreadPolicy.fixed(1), partitions=PartitionPolicy.fixed(1))
queue.produce(1)
assert entered.wait(10)
queue.produce_many([2, 3])
child = os.fork()
if child == 0:
    release.set()
    queue.produce(4)
    queue.close()
    os._exit(seen != [4])
assert os.waitpid(child, 0)[1] == 0
release.set()
assert queue.close()
print(seen)
""",
        tmp_path,
    )

    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "[1, 2, 3]\n", "")


def test_a_fork_of_a_closed_queue_stays_closed(tmp_path: Path) -> None:
    ran = run(
        """
queue = queue_of()
queue.close()
child = os.fork()
if child == 0:
    os._exit(7 if not queue.produce(A()) and queue.close() else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""",
        tmp_path,
    )

    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "7\n", "")


def test_sigterm_with_the_default_action_ends_the_process_at_once(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PRELUDE + 'queue_of().produce(A())\nprint("up", flush=True)\ntime.sleep(60)\n')
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM

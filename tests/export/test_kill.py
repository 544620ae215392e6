"""`kill -9` while workers send: what was not acknowledged is sent again, what was is not."""

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

from penstock.export import SendQueue
from penstock.export.exporters.otlp_http import OtlpHttpConfig, OtlpHttpExporter
from penstock.spool import Durability, FastQueue, FastQueueConfig
from penstock.testing import wait_until
from tests.export.misbehaving import Misbehaving, answer
from tests.export.quick import numbered, quick

WORKERS = 2
SENDING = """
import sys, threading
from penstock import Durability, SendQueue, SendQueueConfig
from penstock.export.exporters.otlp_http import OtlpHttpConfig, OtlpHttpExporter

config = SendQueueConfig(path=sys.argv[1], durability=Durability.DISK, workers=2)
sender = SendQueue.open(OtlpHttpExporter(OtlpHttpConfig(url=sys.argv[2], compression="none")), config).start()
for number in range(1000):
    sender.push(b"batch %06d" % number)
print("pushed", flush=True)
threading.Event().wait()
"""


def test_a_killed_sender_loses_nothing_and_sends_nothing_again_that_was_acknowledged(tmp_path: Path) -> None:
    server = Misbehaving()
    server.behaviours = [answer(200)] * 300 + [server.silent] * WORKERS  # so that it is killed before it is done
    with server.running():
        command = [sys.executable, "-c", SENDING, str(tmp_path / "queue"), server.url]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"pushed\n"
            wait_until(lambda: len(server.requests) > 300)
            child.send_signal(signal.SIGKILL)
        server.behaviours.clear()
        before = len(server.requests)
        exporter = OtlpHttpExporter(OtlpHttpConfig(url=server.url, compression="none"))
        with FastQueue(tmp_path / "queue", FastQueueConfig(durability=Durability.DISK)) as queue:
            assert len(queue) >= 1000 - before
            with SendQueue(queue, exporter, quick(workers=WORKERS)) as sender:
                wait_until(lambda: not len(sender))
    times = Counter(request.body for request in server.requests)
    assert set(times) == set(numbered(1000))
    # A send whose acknowledgement the kill cut off, for each worker; nothing else comes twice.
    assert sum(times.values()) - 1000 <= WORKERS

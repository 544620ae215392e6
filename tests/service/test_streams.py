"""What an earlier run knew of cumulative streams: for each process what it keeps, whole or not at all."""

from pathlib import Path

import pytest

from penstock.config.load import load
from penstock.config.tree import ServiceConfig
from penstock.decode.config import IntakeConfig
from penstock.decode.decoder import Decoder
from penstock.decode.outcome import Format
from penstock.decode.stream_owners import HandoverBodies, StreamOwners
from penstock.export.exporters.remote_write_exporter import write_request
from penstock.service.queues import path_for_process
from penstock.service.stream_handover import MEMORY, distribute_files_to_processes
from penstock.testing import FakeClock
from tests.receive.support import NOW, SECOND, counter, request

NAMES = [f"{number}" for number in range(30)]


class Runs:
    """Several processes, one life after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = FakeClock(NOW / SECOND)
        self.turn = 0

    def run(self, count: int, killed: int | None = None) -> float:
        """What all of them count while each stream gains 2; one may be killed in the end."""
        config = load(ServiceConfig, text=f"data_dir: {self.folder}\nprocesses: {count}").config
        distribute_files_to_processes(config)
        owners = [StreamOwners(own, count) if count > 1 else None for own in range(count)]
        processes = [Decoder(IntakeConfig(), self.clock, owners=one) for one in owners]
        paths = [Path(path_for_process(config.resolved(MEMORY), index)) for index in range(count)]
        for process, path in zip(processes, paths, strict=True):
            process.restore(path)
        assert not [path for path in self.folder.iterdir() if path.name.startswith(MEMORY)]
        total = self._count(processes)
        for index, (process, path) in enumerate(zip(processes, paths, strict=True)):
            if index != killed:
                process.save(path)
        self.clock.advance(10.0)
        return total

    def _count(self, processes: list[Decoder]) -> float:
        self.turn += 1
        time, value = NOW + self.turn * SECOND, 2.0 * self.turn
        otlp = request(*(counter(name, (time, value), start=NOW - SECOND) for name in NAMES)).SerializeToString()
        written = write_request([({"__name__": "w_total", "n": n}, [(time // 1_000_000, value)]) for n in NAMES])
        total = 0.0
        for kind, body in ((Format.OTLP, otlp), (Format.REMOTE_WRITE, written)):
            elsewhere: HandoverBodies = {}
            decoded = processes[0].decode(kind, [body], hand_over=lambda bodies, _, to=elsewhere: to.update(bodies))  # type: ignore[misc]
            handed = [
                processes[owner].decode(kind, list(parts.values()), handed_over=[0])
                for owner, parts in elsewhere.items()
            ]
            chunks = [chunk for one in (decoded, *handed) for chunk in one.chunks]
            total += sum(row["value"] for chunk in chunks for row in chunk.points.to_pylist())
        return total


@pytest.mark.parametrize("counts", [(1, 1), (1, 2), (2, 2), (3, 2), (2, 5), (4, 1)])
def test_every_stream_goes_on_where_it_was_however_many_processes_there_are(
    tmp_path: Path, counts: tuple[int, int]
) -> None:
    runs = Runs(tmp_path)
    first, second = counts

    assert runs.run(first) == 0.0  # they began before us
    assert runs.run(second) == 2.0 * 2 * len(NAMES)
    assert runs.run(first) == 2.0 * 2 * len(NAMES)


def test_of_one_that_was_killed_the_streams_are_measured_from_anew_and_the_others_go_on(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.run(3, killed=1)

    kept = runs.run(3)

    assert 0.0 < kept < 2.0 * 2 * len(NAMES)
    assert runs.run(3) == 2.0 * 2 * len(NAMES)


def test_files_that_are_not_complete_are_not_shared_out(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.run(3, killed=1)

    assert runs.run(2) == 0.0  # one that is missing could not be distinguished from a new one
    assert runs.run(2) == 2.0 * 2 * len(NAMES)


def test_a_relay_that_counts_nothing_leaves_nothing_that_would_be_out_of_date(tmp_path: Path) -> None:
    Runs(tmp_path).run(2)
    text = f"data_dir: {tmp_path}\nprocesses: 2\npipelines: {{rollup: false}}\nexporter: {{type: console}}"

    distribute_files_to_processes(load(ServiceConfig, text=text).config)

    assert not list(tmp_path.glob(f"{MEMORY}*"))

"""What `test_disks` runs in mounts of its own.

python -m tests.campaigns.disks <folder> <seed> <seconds> <Spark: with or without>
"""

import sys
from pathlib import Path
from random import Random

from penstock.testing import wait_until
from tests.campaigns.campaign import Campaign, Fault
from tests.campaigns.failing_disk import FailingDisk
from tests.service.running import Running
from tests.service.test_end_to_end import ONE_CORE

PLACES = ("queue", "segments", "tables", "checkpoint")
SIZE = "64M"  # of each


class Disks:
    """One disk for each place, and what may happen to it while requests come in."""

    def __init__(self, folder: Path, *, spark: bool) -> None:
        self.places = {name: FailingDisk(folder / name, SIZE) for name in (PLACES if spark else PLACES[:2])}
        inside = {name: str(disk.folder / "data") for name, disk in self.places.items()}
        self.service = Running(
            folder,
            ONE_CORE if spark else "",
            segments_queue_path=inside["queue"],
            segments_queue_chunk_size="8Mi",
            segments_location=inside["segments"],
            **({"tables_location": inside["tables"], "spark_checkpoint": inside["checkpoint"]} if spark else {}),
        )
        self.segments = Path(inside["segments"])
        self.tables = inside.get("tables")

    def watch(self, campaign: Campaign) -> dict[str, Fault]:
        self._ledger = campaign.ledger
        faults: dict[str, Fault] = {}
        for name, disk in self.places.items():
            faults[f"{name} full"] = self._full(disk)
            faults[f"{name} refuses files"] = self._refusing(disk)
            faults[f"{name} EIO"] = self._failing(disk)
        return faults

    def _wait_for_attempts(self, rng: Random) -> None:
        """Requests come on, and may be refused."""
        wanted = self._ledger.attempts + rng.randrange(5, 60)
        wait_until(lambda: self._ledger.attempts >= wanted, 60.0)

    def _full(self, disk: FailingDisk) -> Fault:
        def strike(rng: Random) -> None:
            disk.fill()
            self._wait_for_attempts(rng)
            disk.free()

        return strike

    def _refusing(self, disk: FailingDisk) -> Fault:
        def strike(rng: Random) -> None:
            disk.refuse_names()
            self._wait_for_attempts(rng)
            disk.take_names()

        return strike

    def _failing(self, disk: FailingDisk) -> Fault:
        """The service is started anew with the disk that was exchanged."""

        def strike(rng: Random) -> None:
            disk.fail()
            self._wait_for_attempts(rng)
            self.service.kill()
            disk.replace()
            self.service.start()

        return strike


def main(folder: Path, seed: int, seconds: float, *, spark: bool) -> None:
    disks = Disks(folder, spark=spark)
    with Campaign(disks.service, seed, tables=disks.tables, segments=disks.segments) as campaign:
        campaign.strike(disks.watch(campaign), seconds)
        campaign.settle()
        print(campaign.report("disks"))  # noqa: T201 - the campaign's report


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), spark=sys.argv[4] == "with")

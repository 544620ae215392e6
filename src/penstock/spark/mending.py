"""Before a run: what a power cut has torn of the tables or of the segments' folder is set aside, and restored."""

import logging

from penstock.errors import SegmentVanished, TableConflict
from penstock.spark.segment_folder import IDENTITY_FILE, SegmentSourceFolder
from penstock.tables.port import SCHEMAS, Tables

log = logging.getLogger(__name__)


def mend(tables: Tables, folder: SegmentSourceFolder) -> int:
    """Make tables readable again, and give a folder back the identity that it lost; how many files lie aside.

    The guards of mended tables go back to what is whole, so that the run which begins adds the rest from segments.
    """
    folder.refresh()

    def covered(writer: str, after: int, up_to: int) -> bool:
        try:
            folder.check_whole(*({writer: {"last": last, "segments": 0}} for last in (after, up_to)))
        except SegmentVanished:
            return False
        return True

    aside = tables.mend(covered)
    if folder.has_torn_identity():
        _restore_identity(tables, folder)
    return aside


def _restore_identity(tables: Tables, folder: SegmentSourceFolder) -> None:
    """By what the tables say of the writers whose segments lie here: their guards name the folder."""
    writers = {segment.writer for segment in folder.after({})}
    found = set()
    for application in {one for name in SCHEMAS for one in tables.held(name)}:
        kind, _, rest = application.partition("/")
        source, _, writer = rest.partition("/")
        if kind == "penstock" and source != "queue" and writer in writers:
            found.add(source)
    if len(found) > 1:
        raise TableConflict(
            f"{folder.folder / IDENTITY_FILE} is empty, and the tables hold segments of these writers from "
            f"{len(found)} folders: write the identity of this one into it, one of {', '.join(sorted(found))}"
        )
    identity = folder.identify(next(iter(found), None))
    log.warning(
        "A power cut has emptied the mark of the segments' folder, and it is written again. folder=%s identity=%s "
        "known_to_the_tables=%s", folder.folder, identity, bool(found),
    )  # fmt: skip

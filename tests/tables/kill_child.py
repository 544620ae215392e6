"""The process that `test_kill` kills: one step of maintenance on the tables that are named, or their upgrade.

It says `go` when the step begins.
"""

import os
import sys
from datetime import datetime

from penstock.tables.port import SCHEMAS, open_tables
from penstock.tables.upgrade import upgrade_tables


def main(location: str, step: str, before: str) -> None:
    tables = open_tables(location)
    os.write(1, b"go\n")
    if step == "upgrade":
        assert list(upgrade_tables(tables))
    for name in SCHEMAS:
        if step == "fold":
            tables.compact(name)
        elif step == "expire":
            tables.expire(name, datetime.fromisoformat(before), ("avg",))
            tables.expire(name, datetime.fromisoformat(before))
    if step == "vacuum":
        tables.vacuum(0)


if __name__ == "__main__":
    main(*sys.argv[1:])

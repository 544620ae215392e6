"""HOLDER: the tables port and its adapters, read and merged without a JVM.

from penstock.tables import open_tables, read_level, read_top_n
read_level(open_tables("/data/tables"), Level.HOUR)
"""

from penstock.tables.port import open_tables, read_level, read_top_n

__all__ = ["open_tables", "read_level", "read_top_n"]

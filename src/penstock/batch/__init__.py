"""HOLDER: a partitioned in-process queue that drains itself and dispatches by type."""

"""HOLDER: a durable queue, memory first, disk behind it."""

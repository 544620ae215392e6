"""MOVER: from the durable queue to a destination."""

"""A sink that keeps what it is given, and a running HTTP receiver in front of it."""

from tests.receive.fixtures import http, intake, sink

__all__ = ["http", "intake", "sink"]

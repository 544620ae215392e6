"""Receivers for the pages that show calls."""

from tests.receive.fixtures import http, intake, sink

__all__ = ["http", "intake", "sink"]

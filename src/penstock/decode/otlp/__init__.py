"""OTLP metric requests into columns."""

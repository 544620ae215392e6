"""WIRING: the configuration: its classes, how it is read, shown and documented."""

"""WIRING: the `penstock` command, one file a command, and the screens that they show."""

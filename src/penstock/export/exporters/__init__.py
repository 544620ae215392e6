"""The destinations: one file each."""

"""MOVER: L1, merges points of one series before they travel."""

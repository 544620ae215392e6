"""MOVER: bodies into columns of points."""

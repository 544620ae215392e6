"""Requests as bytes into columns of points: what is read, whose it is, and what it adds to what was there."""

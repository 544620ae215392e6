"""How many random examples a property is tried with."""

from hypothesis import settings


def at_most(count: int) -> int:
    """So many, or fewer where the profile that was asked for says so (`make test-fast`)."""
    return min(count, settings.default.max_examples if settings.default else count)

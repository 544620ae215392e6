"""How many random examples a property is tried with."""

from hypothesis import settings


def examples(count: int) -> int:
    """So many in the full run; with fewer by default (`make test-fast`), the same share of them."""
    chosen, full = settings.default, settings.get_profile("default")
    return max(1, count * chosen.max_examples // full.max_examples) if chosen else count

"""What a metric may be called: what every table can hold, and every reader can see."""

LONGEST_NAME = 512  # characters, of up to four bytes each: an index of PostgreSQL takes no more than 2,700 bytes


def metric_name_fault(metric: str, longest: int = LONGEST_NAME) -> str:
    """The fault in a metric's name; empty if there is none."""
    if not 0 < len(metric) <= longest:
        return f"a metric's name must have 1 to {longest} characters, got {len(metric)}: {metric[:40]!r}"
    return "" if metric.isprintable() else f"a metric's name must be printable, got {metric[:100]!r}"


def is_encodable_name(text: str) -> bool:
    """Whether a text can be written as UTF-8: JSON and YAML can hold half a character, "\\ud800"."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

"""Makes foreign text safe to print: names and values come from senders, and a terminal obeys control characters."""


def printable(text: str) -> str:
    r"""The text with `\n`, `\x1b` and the like in place of what is no visible sign."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)

"""Texts of others on a screen or in a log: names and values come from senders, and a terminal obeys them."""


def printable(text: str) -> str:
    r"""The text with `\n`, `\x1b` and the like in place of what is no visible sign."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)

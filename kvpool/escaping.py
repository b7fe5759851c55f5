"""Escaping of untrusted text in output lines: names of models, adapters and the like come from clients.

A line break, a terminal's control sequence or a character that turns the direction of writing would let a name forge lines, or
hide some: every character that is not printable is shown by its number. A pure function; any thread.
"""


def escaped(text: str) -> str:
    """The text on one line: characters that cannot be printed as Python writes them in a string, such as `\\n` and `\\x1b`."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)

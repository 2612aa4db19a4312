"""The one exception of flatlens: a number is right, or flatlens raises with one sentence."""


class FlatlensError(ValueError):
    """An error whose message says what is wrong, where, and what to do about it."""


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message, or its type."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def counted(count: int, noun: str) -> str:
    """Return a number and its noun, singular or plural.

    >>> counted(1, "layer"), counted(2, "entry"), counted(1000, "class")
    ('1 layer', '2 entries', '1,000 classes')
    """
    if count == 1:
        return f"1 {noun}"
    endings = {"y": f"{noun[:-1]}ies", "s": f"{noun}es"}
    return f"{count:,} {endings.get(noun[-1], noun + 's')}"

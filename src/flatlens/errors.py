"""The one exception of flatlens: a number is right, or it is refused in one sentence."""


class FlatlensError(ValueError):
    """What is wrong, where, and what to do about it."""


def first_line(error: Exception) -> str:
    """What an exception says, without its trace."""
    return (str(error).splitlines() or [type(error).__name__])[0]

"""The one exception of flatlens: a number is right, or it is refused in one sentence."""


class FlatlensError(ValueError):
    """What is wrong, where, and what to do about it."""

"""One call and its result: `measure`, the `Measurement` it returns, what can be done with it."""

from flatlens.measurement.result import Measurement

__all__ = ["Measurement"]

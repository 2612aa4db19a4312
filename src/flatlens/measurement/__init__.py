"""The call `measure`, its result `Measurement`, and what a Measurement can do."""

from flatlens.measurement.result import Measurement

__all__ = ["Measurement"]

"""Old name of :mod:`flatlens.data`; it goes with the next release."""

import warnings

from flatlens.data import Data, load

__all__ = ["Data", "load"]

warnings.warn(
    "flatlens.experiments.data is now flatlens.data; the old name goes with the next release.",
    DeprecationWarning,
    stacklevel=2,
)

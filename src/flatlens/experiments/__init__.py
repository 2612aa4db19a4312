"""Old home of :mod:`flatlens.data`; it goes with the next release."""

"""The functions of :mod:`flatlens.files.replacing` under the name that run folders use."""

from flatlens.files.replacing import replacing, write_whole

__all__ = ["replacing", "write_whole"]

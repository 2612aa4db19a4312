"""Networks whose parameters lie elsewhere: in other processes, in main memory or on a disk."""

from flatlens.capture.weights.whole import whole_weights

__all__ = ["whole_weights"]

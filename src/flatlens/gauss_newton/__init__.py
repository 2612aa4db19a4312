"""The spectrum of the Gauss-Newton matrix: exact from a Gram matrix, or by block Lanczos."""

"""Linear algebra that knows nothing about networks: spectra, norms, Lanczos, traces."""

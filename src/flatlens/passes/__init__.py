"""The passes over a network: they choose a method, measure chunk by chunk, and fill a Probe."""

"""Training: the networks of the paper, one training run, and sweeps of many runs."""

"""Capture what the network does: the calls of layers, and the samples in each tensor."""

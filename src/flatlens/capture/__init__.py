"""What the network does: which layers are called on what, and how the samples lie in a batch."""

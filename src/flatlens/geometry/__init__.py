"""Global geometry of representations: the shape of the cloud of all samples at every layer."""

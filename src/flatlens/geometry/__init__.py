"""Global geometry of representations: how a whole cloud of samples looks at every layer."""

"""Times of layers, training steps and kernels on this machine, each beside its baseline in one run."""

"""Benchmarks of layers, training steps and kernels on this machine, each with its baseline from the same run."""

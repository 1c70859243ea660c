"""Quantizers: symmetric integers, fp8, the published LUQ and SAWB, rounding modes, and packing of 4-bit codes."""

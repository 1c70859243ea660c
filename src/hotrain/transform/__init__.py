"""Walsh–Hadamard transforms: `hadamard`, the kept `rows`, rows drawn by `importance`, the tiling of `tokens`."""

"""Walsh–Hadamard transforms: the rotation (`hadamard`), the kept rows (`rows`), the tiling of tokens (`tokens`)."""

"""Step 1, a change of basis: `hadamard` rotates, `rows` says which coefficients stay, `tokens` where the tiles lie."""

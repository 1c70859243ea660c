"""Step 5, the same two gradients on a GPU: each operand is read once, rotated, projected and turned into codes on the way.

`reason` says what is served, `keep` is forward's part, `gradients` backward's. The numbers are those of
`hotrain.backward`; `compress` has the one kernel that reads, `product` the products of codes, `rows` and `noise` the
draws. Triton is imported when something is first served, so that importing this package needs only torch.
"""

from __future__ import annotations

from .serve import disabled, forward, grad_codes, gradients, keep, kept_shapes, next_key, prepare, reason, weight_codes

__all__ = [
    "disabled",
    "forward",
    "grad_codes",
    "gradients",
    "keep",
    "kept_shapes",
    "next_key",
    "prepare",
    "reason",
    "weight_codes",
]

"""Step 5, the two gradients on a GPU: each operand is read once, rotated, projected and turned into codes on the way.

`reason` says what is served, `keep` is forward's part, `gradients` backward's. The numbers are those of
`hotrain.backward`; `compress` has the one kernel that reads, `product` the products of codes, `rows` and `noise` the
draws. Triton is imported when something is first served, so that importing this package needs only torch.
"""

from __future__ import annotations

from .serve import (
    accumulation,
    disabled,
    forward,
    grad_codes,
    gradients,
    has_fp8,
    keep,
    kept_shapes,
    next_key,
    note,
    prepare,
    reason,
    weight_codes,
)

__all__ = [
    "accumulation",
    "disabled",
    "forward",
    "grad_codes",
    "gradients",
    "has_fp8",
    "keep",
    "kept_shapes",
    "next_key",
    "note",
    "prepare",
    "reason",
    "weight_codes",
]

"""Step 5, the two gradients on a GPU: each operand is read once, rotated, projected and turned into codes on the way.

`reason` says what is served, `keep` is forward's part, `gradients` backward's. The numbers are those of
`hotrain.backward`; `compress` has the one kernel that reads, `product` the products of codes, `rows` and `noise` the
draws. `buffers` has the kernels of what lies between the layers, `unfused` those that eager mode has of its own. Triton
is imported when something is first served, so that importing this package needs only torch.
"""

from __future__ import annotations

from .serve import (
    FUNCTIONS,
    accumulation,
    activate,
    bits_gradient,
    buffers_reason,
    disabled,
    forward,
    grad_codes,
    gradients,
    has_fp8,
    keep,
    keep_codes,
    keep_four,
    keep_normal,
    kept_shapes,
    lies_in_rows,
    next_key,
    norm_gradient,
    normalize,
    note,
    open_bits,
    prepare,
    reason,
    restore_codes,
    restore_four,
    restore_rows,
    row_norm_gradient,
    slope_gradient,
    weight_codes,
)

__all__ = [
    "FUNCTIONS",
    "accumulation",
    "activate",
    "bits_gradient",
    "buffers_reason",
    "disabled",
    "forward",
    "grad_codes",
    "gradients",
    "has_fp8",
    "keep",
    "keep_codes",
    "keep_four",
    "keep_normal",
    "kept_shapes",
    "lies_in_rows",
    "next_key",
    "norm_gradient",
    "normalize",
    "note",
    "open_bits",
    "prepare",
    "reason",
    "restore_codes",
    "restore_four",
    "restore_rows",
    "row_norm_gradient",
    "slope_gradient",
    "weight_codes",
]

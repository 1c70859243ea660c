"""Triton kernels: the two gradients of layers, and packing and unpacking of saved activations.

For layers, `reason` says what is supported, `keep` is forward's part, `gradients` backward's, with the values of
`hotrain.backward`: `quantize_kernels` has the kernel that reads x, g_y or w, `gemm` the products of codes, `rows` and
`noise` the draws. `activation_kernels` has the kernels of activations, norms and attention, `eager_kernels` those that
only eager mode uses. Triton is imported when a kernel first runs, so that importing this package needs only torch.
"""

from __future__ import annotations

from .dispatch import (
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
    switched_off,
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
    "switched_off",
    "weight_codes",
]

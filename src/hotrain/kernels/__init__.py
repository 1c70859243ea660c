"""Triton kernels: the two gradients of layers, and packing and unpacking of saved activations.

For layers, `reason` says what is supported, `keep` is forward's part, `gradients` backward's, with the values of
`hotrain.backward`: `quantize_kernels` has the kernel that reads x, g_y or w, `gemm` the products of codes, `rows` and
`noise` the draws. For saved activations, `codes` packs and unpacks, and operators have a file each, of the name of that
in `compress.operators`; `run` calls them. Triton is imported when a kernel first runs, so that importing this package
needs only torch.
"""

from __future__ import annotations

from .dispatch import (
    accumulation,
    forward,
    grad_codes,
    gradients,
    keep,
    kept_shapes,
    next_key,
    prepare,
    weight_codes,
)
from .support import FUNCTIONS, buffers_reason, disabled, has_fp8, note, reason, rows_in_memory, run, switched_off

__all__ = [
    "FUNCTIONS",
    "accumulation",
    "buffers_reason",
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
    "rows_in_memory",
    "run",
    "switched_off",
    "weight_codes",
]

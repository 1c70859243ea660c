"""Triton kernels: the two gradients of layers, and packing and unpacking of saved activations.

For layers, `reason` says what is supported, `keep` is forward's part, `gradients` and `conv2d_gradients` backward's,
with the values of `hotrain.backward` and `hotrain.convolution`: `quantize_kernels` has the kernel that reads x, g_y or
w, `gemm` the products of codes, `lift` restores x, `rows` and `noise` draw. For saved activations, `codes` packs and
unpacks, and most operators have a file of the name of that in `compress.operators`; `run` calls them. Triton is
imported when a kernel first runs, so that importing this package needs only torch.
"""

from __future__ import annotations

from .backward import grad_codes, grad_shapes, gradients, prepare_codes, products, reads_codes_alone
from .convolution import conv2d_gradients
from .dispatch import accumulation, forward, keep, kept_shapes, next_key, prepare, weight_codes
from .formats import Coded, Joined, channels_at_once
from .launch import inlines
from .operands import device_key
from .support import (
    FUNCTIONS,
    buffers_reason,
    disabled,
    has_fp8,
    note,
    reason,
    rows_in_memory,
    run,
    switched_off,
    written_over,
)

__all__ = [
    "FUNCTIONS", "Coded", "Joined", "accumulation", "buffers_reason", "channels_at_once", "conv2d_gradients",
    "device_key", "disabled", "forward", "grad_codes", "grad_shapes", "gradients", "has_fp8", "inlines", "keep",
    "kept_shapes", "next_key", "note", "prepare", "prepare_codes", "products", "reads_codes_alone", "reason",
    "rows_in_memory", "run", "switched_off", "weight_codes", "written_over",
]  # fmt: skip

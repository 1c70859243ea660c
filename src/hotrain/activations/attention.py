"""Scaled dot products of queries, keys and values: PyTorch's fused kernels, with codes kept in place of tensors.

Kept: q, k and v as codes, a scale for every head of every token. Backward runs the kernel once more on what they were
rounded to: gradients are those of attention at these values, with weights that sum to one. Against the exact output and
log-sum-exp the weights that backward makes would be off by the exponential of the rounding of a logit, without bound
(docs/numerics.md). Which kernel runs is PyTorch's choice, read from the same switches
(`torch.nn.attention.sdpa_kernel`); where none of the fused ones can, PyTorch's function runs as it is.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from ..autograd import once
from . import kernel_ops

_aten = torch.ops.aten


def backend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool) -> str | None:
    """Which fused kernel can run, None for none."""
    # The kernels believe the shapes they are given: what PyTorch broadcasts or refuses must not reach them.
    same = q.dtype == k.dtype == v.dtype and q.dim() == k.dim() == 4 and k.shape == v.shape and k.shape[2] > 0
    if not same or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or (causal and mask is not None):
        return None
    if q.shape[1] % k.shape[1] or not q.stride(3) == k.stride(3) == v.stride(3) == 1:
        return None
    # PyTorch refuses the others, and runs its plain formula for three axes on a CPU.
    axes = (2, 4) if q.device.type == "cpu" else (2, 3, 4)
    if mask is not None and (mask.dim() not in axes or mask.dtype not in (torch.bool, torch.float32, q.dtype)):
        return None
    flash, efficient, cudnn = _switches()
    if q.device.type in ("cpu", "meta"):  # shapes alone stand for a CPU's tensors (`analysis.predicted`)
        fits = flash and dropout == 0 and q.dtype in (torch.float32, torch.float64, torch.bfloat16)
        trained = mask is not None and mask.requires_grad
        return "cpu" if fits and not trained else None
    if q.device.type != "cuda":
        return None
    half = q.dtype in (torch.float16, torch.bfloat16)
    ampere = _is_ampere(q.device)
    # Its causal mask ends at the last key, PyTorch's begins at the first.
    square = q.shape[2] == k.shape[2] or not causal
    if mask is None and half and ampere and cudnn:
        sizes = [operator.index(n) for n in (q.shape[1] // k.shape[1], q.shape[2], k.shape[2], q.shape[3])]
        if _prefers_cudnn(q.device, q.dtype, sizes[0], sizes[1], sizes[2], sizes[3], dropout > 0, causal):
            return "cudnn"
    if flash and ampere and half and mask is None and square and q.shape[-1] <= 256 and q.shape[-1] % 8 == 0:
        return "flash"
    aligned = q.shape[-1] % (8 if half else 4) == 0
    if aligned and q.dtype != torch.float64 and (ampere or q.dtype != torch.bfloat16) and efficient:
        return "efficient"
    return None


_preferred: dict[tuple[Any, ...], bool] = {}  # by what was asked: a tracer goes through `functools.cache`


def _prefers_cudnn(
    device: torch.device, dtype: torch.dtype, heads: int, queries: int, keys: int, width: int, drops: bool, causal: bool
) -> bool:
    """Whether PyTorch itself would run cuDNN's kernel, without a mask: it is asked, with one sample of tensors.

    heads: of q, for one of k and v.
    """
    asked = (device, dtype, heads, queries, keys, width, drops, causal)
    if asked not in _preferred:
        with _disable_current_modes():  # those of a tracer
            q = torch.empty(1, heads, queries, width, device=device, dtype=dtype)
            k = torch.empty(1, 1, keys, width, device=device, dtype=dtype)
            dropout = 0.1 if drops else 0.0
            chosen = torch._fused_sdp_choice(q, k, k, None, dropout, causal, enable_gqa=heads > 1)
        _preferred[asked] = bool(chosen == SDPBackend.CUDNN_ATTENTION.value)
    return _preferred[asked]


def _switches() -> tuple[bool, bool, bool]:
    """Whether the flash kernels (the CPU's too), the memory-efficient one and cuDNN's are switched on."""
    on = torch.backends.cuda
    return on.flash_sdp_enabled(), on.mem_efficient_sdp_enabled(), on.cudnn_sdp_enabled()


def _is_ampere(device: torch.device) -> bool:
    """Whether the compute capability is 8.0 at least: the flash kernel, and bfloat16 in the other, ask for it."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


# A tracer cannot follow the questions.
_prefers_cudnn._dynamo_marked_constant = True  # type: ignore[attr-defined]
_switches._dynamo_marked_constant = True  # type: ignore[attr-defined]
_is_ampere._dynamo_marked_constant = True  # type: ignore[attr-defined]


def prepared_mask(mask: Tensor | None, q: Tensor, k: Tensor, kind: str) -> Tensor | None:
    """The mask as the kernel asks: added to the logits, in q's dtype, for every head; differentiable."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros((), dtype=q.dtype, device=q.device).masked_fill(mask.logical_not(), -math.inf)
    mask = mask.to(q.dtype)
    if kind == "cpu":
        return mask if mask.dim() == 4 else mask.expand(1, 1, *mask.shape)
    # The kernel reads rows of it in runs of 16 entries.
    keys = k.shape[-2]
    if keys % 16:
        mask = F.pad(mask.expand(*mask.shape[:-1], keys), (0, -keys % 16))[..., :keys]
    return mask.expand(q.shape[0], q.shape[1], q.shape[-2], keys)


def _bias(mask: Tensor | None, q: Tensor, k: Tensor, kind: str) -> Tensor | None:
    # Booleans are kept as they are, shared by all layers, and turned into numbers by each, twice.
    return prepared_mask(mask, q, k, kind) if mask is not None and mask.dtype == torch.bool else mask


class Attention(torch.autograd.Function):
    """softmax(q kᵀ scale + mask) v.  q: (B, H, T, D).  k, v: (B, H or a divisor, T', D).

    mask: booleans, True where a query may look, or numbers of `prepared_mask`.  Returns the result, and its codes and
    scales, of (B, T, H, D).
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        dropout: float,
        causal: bool,
        scale: float,
        kind: str,
        qk_form: str,
        vo_form: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        copies = _copies(q, k, kind)
        wide_k, wide_v = _repeated(k, copies), _repeated(v, copies)
        bias = _bias(mask, q, k, kind)
        out, _, (_, _, *seed), _ = _run(kind, q, wide_k, wide_v, bias, dropout, causal, scale)
        # Token by token, as layers leave q, k and v in memory and want their gradients.
        codes = kernel_ops.keep_four([t.transpose(1, 2) for t in (q, k, v, out)], (qk_form, vo_form))
        # What dropout left out is seen from the output alone.
        ctx.save_for_backward(mask, *(codes + seed if dropout else codes[:6]))
        ctx.args = dropout, causal, scale, kind, qk_form, vo_form
        ctx.shapes, ctx.dtype = (q.shape, k.shape, v.shape, out.shape), q.dtype
        ctx.mark_non_differentiable(*codes[6:])
        ctx.set_materialize_grads(False)
        return out, codes[6], codes[7]

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        dropout, causal, scale, kind, qk_form, vo_form = ctx.args
        mask, *saved = ctx.saved_tensors
        codes, seed = saved[:8], saved[8:]
        lying = [_by_token(shape) for shape in ctx.shapes[: len(codes) // 2]]
        q, k, v, *out = (
            t.transpose(1, 2) for t in kernel_ops.restored_four((qk_form, vo_form), codes, lying, ctx.dtype)
        )
        copies = _copies(q, k, kind)
        k, v = _repeated(k, copies), _repeated(v, copies)
        # For a compiler one operator, of g too: it runs in backward, and nothing but codes is kept for it.
        run = gradients if _get_current_dispatch_mode() is None else torch.ops.hotrain.attention_gradients
        wants_mask = ctx.needs_input_grad[3]
        g_q, g_k, g_v, g_mask = run(
            g, q, k, v, _bias(mask, q, k, kind), [*out, *seed], dropout, causal, scale, kind, wants_mask
        )
        grads = g_q, _summed(g_k, copies), _summed(g_v, copies), g_mask if wants_mask else None
        return *once("attention", grads, g, mask), *[None] * 6


def gradients(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    dropped: list[Tensor],
    dropout: float,
    causal: bool,
    scale: float,
    kind: str,
    wants_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of attention at q, k, v, with as many heads each: of these, and of the mask, empty where it is not wanted.

    dropped: under dropout the output, seed and offset of forward.
    """
    out, lse, (ends_q, ends_k, seed, offset), (max_q, max_k) = _run(kind, q, k, v, bias, 0.0, causal, scale)
    if dropout:
        out, seed, offset = dropped
    g_mask = None
    if kind == "flash":
        g_q, g_k, g_v = _aten._scaled_dot_product_flash_attention_backward(
            g, q, k, v, out, lse, ends_q, ends_k, max_q, max_k, dropout, causal, seed, offset, scale=scale
        )
    elif kind == "cudnn":
        g_q, g_k, g_v = _aten._scaled_dot_product_cudnn_attention_backward(
            g, q, k, v, out, lse, seed, offset, bias, ends_q, ends_k, max_q, max_k, dropout, causal, scale=scale
        )
    elif kind == "efficient":
        needs = [True, True, True, wants_mask]
        g_q, g_k, g_v, g_mask = _aten._scaled_dot_product_efficient_attention_backward(
            g, q, k, v, bias, out, lse, seed, offset, dropout, needs, causal, scale=scale
        )
    else:
        g_q, g_k, g_v = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
        )
    return g_q, g_k, g_v, g_mask if wants_mask and g_mask is not None else g.new_empty(0)


_lib = torch.library.Library("hotrain", "FRAGMENT")
_lib.define(
    "attention_gradients(Tensor g, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor[] dropped, float dropout, "
    "bool causal, float scale, str kind, bool wants_mask) -> (Tensor, Tensor, Tensor, Tensor)"
)
_lib.impl("attention_gradients", gradients, "CompositeExplicitAutograd")


def _run(
    kind: str, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float, causal: bool, scale: float
) -> tuple[Tensor, Tensor, list[Any], list[Any]]:
    """The output, the log-sum-exp of each row, ends of sequences with seed and offset, and longest sequences."""
    if kind == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
        return out, lse, [None] * 4, [None] * 2
    if kind == "efficient":
        out, lse, seed, offset = _aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, dropout, causal, scale=scale
        )
        return out, lse, [None, None, seed, offset], [None] * 2
    if kind == "flash":
        found = _aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, False, scale=scale)
    else:
        found = _aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, dropout, causal, False, scale=scale)
    out, lse, ends_q, ends_k, max_q, max_k, seed, offset, _ = found
    return out, lse, [ends_q, ends_k, seed, offset], [max_q, max_k]


def _copies(q: Tensor, k: Tensor, kind: str) -> int:
    """How often each head of k and v is written out: cuDNN shares them among heads of q by itself."""
    return 1 if kind == "cudnn" else q.shape[1] // k.shape[1]


def _by_token(shape: torch.Size) -> tuple[int, ...]:
    return shape[0], shape[2], shape[1], shape[3]


def _repeated(t: Tensor, copies: int) -> Tensor:
    return t if copies == 1 else t.repeat_interleave(copies, 1)


def _summed(g: Tensor, copies: int) -> Tensor:
    return g if copies == 1 else g.unflatten(1, (-1, copies)).sum(2)

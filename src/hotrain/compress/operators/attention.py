"""Scaled dot-product attention on PyTorch's fused kernels, with q, k and v saved quantized.

Each head of each token has a scale of its own. Backward dequantizes q, k and v and runs the forward kernel once more:
the gradients are those of attention at the rounded values, whose weights sum to one. With the log-sum-exp of the exact
forward the weights would be wrong by the exponential of a logit's rounding error, which has no bound
(docs/numerics.md). A constant in all keys, or in all values, changes no gradient: k and, but for dropout, v are packed
less one for each channel of each sample (`quantize.channels.middles`), which would take their range. The result's codes
are for the layer behind; under dropout backward needs them too. PyTorch's own choice of kernel is followed, from the
same switches (`torch.nn.attention.sdpa_kernel`). Where no fused kernel can run, PyTorch's function runs unchanged.

Shapes, if not said otherwise: q and the result (B, H, T, D); k and v (B, H or a divisor of it, T', D). ``mask`` is
boolean, True where a query may attend, or numbers that are added to the logits, or None; ``dropout`` the probability of
dropping an attention weight; ``causal`` whether the causal mask is applied; ``scale`` the factor of the logits;
``kind`` the fused kernel, of `backend`.
"""

from __future__ import annotations

import itertools
import math
import operator
import types
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from ...autograd import differentiated_once
from ...casting import autocast
from ...kernels import rows_in_memory
from ...private import any_autocast, constant_in_graphs, dispatch_modes, no_dispatch_modes
from ...quantize.channels import middles
from ...saved import group_size
from .. import exact_attention, rematerialize
from ..codes import empty_codes, has_kernel, pack, unpack
from ..formats import FORMATS, GROUPED
from ..launcher import is_eager, launch, opaque, operator_for, supported, supported_in_eager
from .base import Handlers, Scope, custom_op, direct, is_large, without_autocast

_aten = torch.ops.aten
_numbers = itertools.count()
_CUDNN_MASKED = -65504.0  # what PyTorch gives cuDNN for False


# ---- reference: PyTorch's kernels ----


def backend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool) -> str | None:
    """The fused kernel that PyTorch would run: "cpu", "flash", "efficient" or "cudnn"; None if no one can run."""
    # The kernels do not check shapes: what PyTorch broadcasts or refuses must not reach them.
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
    if q.device.type in ("cpu", "meta"):  # meta tensors are counted as a CPU's (`audit.predicted`)
        fits = flash and dropout == 0 and q.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        trained = mask is not None and mask.requires_grad
        return "cpu" if fits and not trained else None
    if q.device.type != "cuda":
        return None
    half = q.dtype in (torch.float16, torch.bfloat16)
    ampere = _is_ampere(q.device)
    # Its causal mask ends at the last key, PyTorch's begins at the first.
    square = q.shape[2] == k.shape[2] or not causal
    fits = mask is None or (mask.stride(-1) == 1 and not mask.requires_grad)
    if half and ampere and cudnn and fits:
        sizes = [operator.index(n) for n in (q.shape[1] // k.shape[1], q.shape[2], k.shape[2], q.shape[3])]
        masked = (0, q.dtype) if mask is None else (mask.dim(), mask.dtype)
        facts = (sizes[0], sizes[1], sizes[2], sizes[3], dropout > 0, causal, masked[0], masked[1])
        if _prefers_cudnn(q.device, q.dtype, *facts):
            return "cudnn" if masked[0] != 3 else None  # whose first axis it takes for the batch
    if flash and ampere and half and mask is None and square and q.shape[-1] <= 256 and q.shape[-1] % 8 == 0:
        return "flash"
    aligned = q.shape[-1] % (8 if half else 4) == 0
    if aligned and q.dtype != torch.float64 and (ampere or q.dtype != torch.bfloat16) and efficient:
        return "efficient"
    return None


_preferred: dict[tuple[Any, ...], bool] = {}  # by arguments; Dynamo would trace through `functools.cache`


@constant_in_graphs
def _prefers_cudnn(
    device: torch.device, dtype: torch.dtype, heads: int, queries: int, keys: int, width: int, drops: bool,
    causal: bool, axes: int, kind: torch.dtype,
) -> bool:  # fmt: skip
    """Whether PyTorch would run cuDNN's kernel.

    ``heads`` is the number of q's heads for one of k's, ``axes`` how many a mask has, 0 for none, ``kind`` its dtype.
    """
    asked = (device, dtype, heads, queries, keys, width, drops, causal, axes, kind)
    if asked not in _preferred:
        with no_dispatch_modes():  # those of make_fx and Dynamo
            q = torch.empty(1, heads, queries, width, device=device, dtype=dtype)
            k = torch.empty(1, 1, keys, width, device=device, dtype=dtype)
            row = torch.empty(keys, device=device, dtype=kind)
            mask = row.expand(*[1] * (axes - 2), queries, keys) if axes else None
            dropout = 0.1 if drops else 0.0
            chosen = torch._fused_sdp_choice(q, k, k, mask, dropout, causal, enable_gqa=heads > 1)
        _preferred[asked] = bool(chosen == SDPBackend.CUDNN_ATTENTION.value)
    return _preferred[asked]


@constant_in_graphs
def _switches() -> tuple[bool, bool, bool]:
    """Whether the flash kernels (the CPU's too), the memory-efficient one and cuDNN's are switched on."""
    on = torch.backends.cuda
    return on.flash_sdp_enabled(), on.mem_efficient_sdp_enabled(), on.cudnn_sdp_enabled()


@constant_in_graphs
def _is_ampere(device: torch.device) -> bool:
    """Whether the compute capability is 8.0 at least: the flash kernel, and bfloat16 in the other, ask for it."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def prepared_mask(mask: Tensor | None, q: Tensor, k: Tensor, kind: str) -> Tensor | None:
    """The mask as the kernel takes it: numbers in q's dtype.

    Broadcast to (B, H, T, T') except for the kernel "cpu" (four axes), and "cudnn", which does so itself.
    Differentiable.
    """
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        lowest = _CUDNN_MASKED if kind == "cudnn" else -math.inf
        mask = torch.zeros((), dtype=q.dtype, device=q.device).masked_fill(mask.logical_not(), lowest)
    mask = mask.to(q.dtype)
    if kind == "cudnn":
        return mask
    if kind == "cpu":
        return mask if mask.dim() == 4 else mask.expand(1, 1, *mask.shape)
    # The kernel reads its rows in runs of 16 elements.
    keys = k.shape[-2]
    if keys % 16:
        mask = F.pad(mask.expand(*mask.shape[:-1], keys), (0, -keys % 16))[..., :keys]
    return mask.expand(q.shape[0], q.shape[1], q.shape[-2], keys)


def _bias(mask: Tensor | None, q: Tensor, k: Tensor, kind: str) -> Tensor | None:
    # A boolean mask is saved as it is, shared by all layers; each layer converts it in forward and in backward.
    return prepared_mask(mask, q, k, kind) if mask is not None and mask.dtype == torch.bool else mask


def _run(
    kind: str, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float, causal: bool, scale: float
) -> tuple[Tensor, Tensor, list[Any], list[Any]]:
    """One forward: output, log-sum-exp per row, [lengths, seed, offset], [longest]."""
    if kind == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu.default(
            q, k, v, 0.0, causal, attn_mask=bias, scale=scale
        )
        return out, lse, [None] * 4, [None] * 2
    if kind == "efficient":
        out, lse, seed, offset = _aten._scaled_dot_product_efficient_attention.default(
            q, k, v, bias, True, dropout, causal, scale=scale
        )
        return out, lse, [None, None, seed, offset], [None] * 2
    if kind == "flash":
        found = _aten._scaled_dot_product_flash_attention.default(q, k, v, dropout, causal, False, scale=scale)
    else:
        found = _aten._scaled_dot_product_cudnn_attention.default(
            q, k, v, bias, True, dropout, causal, False, scale=scale
        )
    out, lse, ends_q, ends_k, max_q, max_k, seed, offset, _ = found
    return out, lse, [ends_q, ends_k, seed, offset], [max_q, max_k]


def _copies(q: Tensor, k: Tensor, kind: str) -> int:
    """How often each head of k and v is repeated; cuDNN supports grouped queries itself."""
    return 1 if kind == "cudnn" else q.shape[1] // k.shape[1]


def _repeated(t: Tensor, copies: int) -> Tensor:
    return t if copies == 1 else t.repeat_interleave(copies, 1)


def _summed(g: Tensor, copies: int) -> Tensor:
    return g if copies == 1 else g.unflatten(1, (-1, copies)).sum(2)


def _gradients(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropped: list[Tensor], *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the mask (empty if not asked for) by a second run of the forward kernel.

    q, k and v are dequantized, heads of k and v repeated as `_copies` says; bias is the mask as numbers; dropped are
    the output, seed and offset of forward under dropout, else empty.
    """
    dropout, causal, scale, kind, wants_mask, _ = args
    out, lse, (ends_q, ends_k, seed, offset), (max_q, max_k) = _run(kind, q, k, v, bias, 0.0, causal, scale)
    if dropout:
        out, seed, offset = dropped
    parts = out, lse, ends_q, ends_k, max_q, max_k, seed, offset
    run, args, more = exact_attention.backward(kind, g, q, k, v, bias, parts, dropout, causal, wants_mask)
    g_q, g_k, g_v, *rest = run(*args, **more, scale=scale)
    return g_q, g_k, g_v, rest[0] if wants_mask and rest else g.new_empty(0)


# ---- kernels: the four tensors, (B, T, H, D), in one launch ----


@cache
def _bits_of_kernel(qk_form: str, vo_form: str, columns: int) -> tuple[int, int] | None:
    """Bits of both formats; None if one kernel cannot pack both, with groups of one size."""
    qk, vo = GROUPED[qk_form], GROUPED[vo_form]
    if qk.whole or vo.whole or not has_kernel(qk_form, columns) or not has_kernel(vo_form, columns):
        return None
    return qk.bits, vo.bits


def _pack_four(tensors: Sequence[Tensor], forms: Sequence[str], dropout: float) -> list[Tensor]:
    """Codes and scales of q, k, v and the output, in order; of k, and v without dropout, less their middles."""
    q, k, v, _ = tensors
    middle = _middles([k] if dropout else [k, v])
    bits = _bits_of_kernel(*forms, operator.index(q.shape[-1])) if supported(q.device, q.dtype) else None
    fits = is_eager(q) or all(rows_in_memory(t) is not None for t in tensors)  # eager mode copies the others
    if bits is None or not fits or any(t.dtype != q.dtype for t in tensors):
        return _packed_by_formula(tensors, forms, middle, pack)
    return operator_for(q, "keep_heads")(tensors, *forms, middle)  # type: ignore[no-any-return]


def _middles(tensors: Sequence[Tensor]) -> Tensor:
    def reference() -> Tensor:
        return middles(tensors)

    first = tensors[0]
    if not supported_in_eager(first):
        return reference()
    return launch(first.device, "attention.middles", reference, tensors)  # type: ignore[no-any-return]


def _less(t: Tensor, middle: Tensor) -> Tensor:
    """t − middle in float32 or more; for float16 within its range, which a difference may exceed."""
    difference = t.to(torch.promote_types(t.dtype, torch.float32)) - middle
    if t.dtype != torch.float16:
        return difference
    most = torch.finfo(t.dtype).max
    return torch.where(t.isinf(), difference, difference.clamp(-most, most)).to(t.dtype)


def _packed_by_formula(
    tensors: Sequence[Tensor], forms: Sequence[str], middle: Tensor, alone: Callable[[Tensor, str], Any]
) -> list[Tensor]:
    """``alone`` packs those from which nothing is subtracted."""
    found: list[Tensor] = []
    for place, t in enumerate(tensors):
        form = forms[place // 2]
        if 0 < place <= len(middle):
            found += rematerialize.keep(GROUPED[form], _less(t, middle[place - 1][:, None]))
        else:
            found += alone(t, form)
    return found


def _keep_heads_fake(tensors: Sequence[Tensor], qk_form: str, vo_form: str, _: Tensor) -> list[Tensor]:
    return [part for place, t in enumerate(tensors) for part in empty_codes(t, (qk_form, vo_form)[place // 2])]


@opaque("keep_heads(Tensor[] tensors, str qk_form, str vo_form, Tensor middle) -> Tensor[]", _keep_heads_fake)
def _keep_heads(tensors: Sequence[Tensor], qk_form: str, vo_form: str, middle: Tensor) -> list[Tensor]:
    def alone(t: Tensor, form: str) -> tuple[Tensor, Tensor]:
        return GROUPED[form].keep(t.contiguous())

    def reference() -> list[Tensor]:
        return _packed_by_formula(tensors, (qk_form, vo_form), middle, alone)

    q = tensors[0]
    size, bits = group_size(q.shape[-1]), _bits_of_kernel(qk_form, vo_form, q.shape[-1])
    return launch(q.device, "attention.pack", reference, tensors, size, bits, middle)  # type: ignore[no-any-return]


def _unpack_four(
    forms: Sequence[str], kept: Sequence[Tensor], shapes: Sequence[Sequence[int]], dtype: torch.dtype
) -> list[Tensor]:
    """What `_pack_four` packed, or its first three tensors."""

    def reference() -> list[Tensor]:
        return [unpack(forms[n // 2], kept[2 * n : 2 * n + 2], shape, dtype) for n, shape in enumerate(shapes)]

    bits = _bits_of_kernel(*forms, shapes[0][-1]) if supported_in_eager(kept[0], dtype) else None
    if bits is None:
        return reference()
    found = launch(kept[0].device, "attention.unpack", reference, kept, bits, dtype)
    return [t.view(*shape) for t, shape in zip(found, shapes, strict=True)]


# ---- autograd function ----


@differentiated_once("attention")
class Attention(torch.autograd.Function):
    """softmax(q kᵀ scale + mask) v; returns it, and its codes and scales, of (B, T, H, D).

    A mask of numbers is that of `prepared_mask`.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
        dropout, causal, scale, kind, *forms = args
        copies = _copies(q, k, kind)
        wide_k, wide_v = _repeated(k, copies), _repeated(v, copies)
        bias = _bias(mask, q, k, kind)
        ctx.number = next(_numbers)
        with rematerialize.noted(rematerialize.ATTENTION, ctx.number):
            out, _, (_, _, *seed), _ = _run(kind, q, wide_k, wide_v, bias, dropout, causal, scale)
        # Packed as (B, T, H, D), the memory layout in which layers write q, k and v and read their gradients.
        codes = _pack_four([t.transpose(1, 2) for t in (q, k, v, out)], forms, dropout)
        # Under dropout backward needs forward's output: a second run would draw another mask.
        ctx.save_for_backward(mask, *(codes + seed if dropout else codes[:6]))
        ctx.args = args
        ctx.shapes, ctx.dtype = (q.shape, k.shape, v.shape, out.shape), q.dtype
        ctx.mark_non_differentiable(*codes[6:])
        return out, *codes[6:]

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        dropout, causal, scale, kind, *forms = ctx.args
        mask, *saved = ctx.saved_tensors
        codes, seed = saved[:8], saved[8:]
        shapes = [(b, t, h, d) for b, h, t, d in ctx.shapes[: len(codes) // 2]]
        q, k, v, *out = (t.transpose(1, 2) for t in _unpack_four(forms, codes, shapes, ctx.dtype))
        copies = _copies(q, k, kind)
        k, v = _repeated(k, copies), _repeated(v, copies)
        # Compiled, one operator that depends on g: the partitioner must leave it in backward and keep codes alone.
        run = _gradients if not dispatch_modes() else torch.ops.hotrain.attention_gradients
        wants_mask = ctx.needs_input_grad[3]
        bias = _bias(mask, q, k, kind)
        # The number is an argument: AOTAutograd gives nodes of backward the metadata of one of forward's.
        rest = (dropout, causal, scale, kind, wants_mask, ctx.number)
        g_q, g_k, g_v, g_mask = run(g, q, k, v, bias, [*out, *seed], *rest)
        grads = g_q, _summed(g_k, copies), _summed(g_v, copies), g_mask if wants_mask else None
        return *grads, *[None] * 6


# ---- registration ----

# Not traced into: compiled, it depends on g, so that the partitioner leaves it in backward and saves codes alone.
_lib = torch.library.Library("hotrain", "FRAGMENT")
_lib.define(
    "attention_gradients(Tensor g, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor[] dropped, float dropout, "
    "bool causal, float scale, str kind, bool wants_mask, int number) -> (Tensor, Tensor, Tensor, Tensor)"
)
_lib.impl("attention_gradients", _gradients, "CompositeExplicitAutograd")

attention = custom_op(
    "kept_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float dropout, bool causal, float scale, str kind, "
    "str qk_form, str vo_form) -> (Tensor, Tensor, Tensor)",
    without_autocast(Attention.apply),
    direct(Attention),
)


def _attention(
    scope: Scope, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor | None:  # fmt: skip
    if not is_large(query) or not (query.requires_grad or key.requires_grad or value.requires_grad):
        return None
    q, k, v, mask = query, key, value, attn_mask
    if torch.compiler.is_compiling() or any_autocast():
        q, k, v = map(autocast, (q, k, v))
        mask = autocast(mask) if mask is not None and mask.is_floating_point() else mask
    kind = backend(q, k, v, mask, dropout_p, is_causal)
    if kind is None or (q.dim() == 4 and q.shape[1] != k.shape[1] and not enable_gqa):
        scope.buffers.record_full("scaled_dot_product_attention", "no fused kernel runs it here")
        return None
    forms = FORMATS["query_key"], FORMATS["value_output"]
    scope.record("scaled_dot_product_attention", f"{forms[0]}, {forms[1]}")
    if mask is not None and mask.dtype != torch.bool:
        mask = prepared_mask(mask, q, k, kind)
        if mask is not None and is_large(mask) and not torch.compiler.is_compiling():
            size = mask.untyped_storage().nbytes() / 2**20
            scope.buffers.record_full(
                "attention mask", f"{size:.1f} MiB per call, numbers that are added to the logits"
            )
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    y, *codes = attention(q, k, v, mask, dropout_p, is_causal, scale, kind, *forms)
    # Models transpose heads and tokens next, which gives the memory layout of the codes: `views` notes that.
    scope.origins.note(y, rematerialize.heads(forms[1], y.shape[-1], dropout_p > 0), *codes, by_heads=True)
    return y


HANDLERS: Handlers = {F.scaled_dot_product_attention: _attention}


def _has_no_torch_function(_: Any) -> bool:
    return False


def _check_padding(mask: Tensor, keys: int, samples: int) -> None:
    """As in PyTorch, whose message Dynamo cannot trace under a mode."""
    for axis, size in enumerate((samples, keys)):
        if mask.shape[axis] != size:
            raise AssertionError(f"Expected key_padded_mask.shape[{axis}] to be {size}, but got {mask.shape[axis]}")


# nn.MultiheadAttention is one call for a mode: PyTorch runs what is in it without one. This body of it passes itself to
# no mode, but all that it calls.
_WHOLE: Any = F.multi_head_attention_forward
_names: dict[str, Any] = {}
_body = types.FunctionType(_WHOLE.__code__, _names, _WHOLE.__name__, _WHOLE.__defaults__)
_body.__kwdefaults__ = _WHOLE.__kwdefaults__
INSIDE = {_WHOLE: _body}


@constant_in_graphs
def renew_names() -> None:
    """Before a call of `INSIDE`: its names are what those of `torch.nn.functional` are now, which users replace.

    What has a name stays the same object: Dynamo's guards are on it.
    """
    _names.update(_WHOLE.__globals__, has_torch_function=_has_no_torch_function, _check_key_padding_mask=_check_padding)

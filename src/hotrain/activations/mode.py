"""While a converted model runs forward, PyTorch's functions are those of `ops`, wherever they are called from.

A function that is not in the table, and a call of one that is but that cannot be served, runs as it is; of the latter
the report says why. Nothing here depends on what changes from step to step, so that nothing is compiled twice.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .. import autograd, backward
from . import ops as _ops  # noqa: F401  (defines the operators)
from .attention import backend, prepared_mask
from .policy import FORMATS, SMALL

_hotrain = torch.ops.hotrain


@dataclass
class Buffers:
    """What became of the calls of a converted model: served operators, and those left full with the reason."""

    served: dict[str, str] = field(default_factory=dict)
    full: dict[str, str] = field(default_factory=dict)

    def serve(self, what: str, form: str) -> None:
        self.served[what] = form

    def leave(self, what: str, why: str) -> None:
        self.full[what] = why

    def __str__(self) -> str:
        rows = [(what, form) for what, form in self.served.items()]
        rows += [(what, f"full: {why}") for what, why in self.full.items()]
        if not rows:
            return "  between the layers: known after a training forward"
        width = max(len(what) for what, _ in rows)
        return "\n".join(["  between the layers:", *(f"    {what:<{width}}  {how}" for what, how in rows)])

    # A tracer runs them once and records nothing.
    serve._dynamo_marked_constant = True  # type: ignore[attr-defined]
    leave._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Compressed(TorchFunctionMode):
    """The mode. buffers: where it is written down what was served."""

    def __init__(self, buffers: Buffers) -> None:
        super().__init__()
        self.buffers = buffers
        self.checkpoint = _checkpoint()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = TABLE.get(func)
        if handler is not None and torch.is_grad_enabled() and "out" not in kwargs and self._may_serve():
            y = handler(self.buffers, *args, **kwargs)
            if y is not None:
                return y
        return func(*args, **kwargs)

    def _may_serve(self) -> bool:
        # A checkpoint that begins inside of the mode makes its function anew outside of it: what it keeps then must be
        # what it kept first.
        return not _transforms() and _checkpoint() == self.checkpoint


def _checkpoint() -> int:
    """Which non-reentrant checkpoint's forward this is, 0 for none."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return 0 if hooks is None or not hooks[0].__qualname__.startswith("_checkpoint_hook.") else id(hooks[0])


def _transforms() -> bool:
    """Whether `torch.func` differentiates or maps this, which autograd functions with a context cannot take part in."""
    return torch._C._are_functorch_transforms_active()


# A tracer asks once.
_transforms._dynamo_marked_constant = True  # type: ignore[attr-defined]
_checkpoint._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _large(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point() and t.numel() >= SMALL


def _activation(name: str) -> Callable[..., Tensor | None]:
    def run(buffers: Buffers, input: Tensor, inplace: bool = False) -> Tensor | None:
        if not (_large(input) and input.requires_grad):
            return None
        buffers.serve(name, "slope")
        y = _hotrain.slope(input, name)
        return input.copy_(y) if inplace else y

    return run


_gelu_exact, _gelu_tanh = _activation("gelu"), _activation("gelu_tanh")


def _gelu(buffers: Buffers, input: Tensor, approximate: str = "none") -> Tensor | None:
    if approximate not in ("none", "tanh"):
        return None
    return (_gelu_tanh if approximate == "tanh" else _gelu_exact)(buffers, input)


_leaky = _activation("leaky_relu")


def _leaky_relu(buffers: Buffers, input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor | None:
    if negative_slope != 0.01:
        buffers.leave("leaky_relu", f"negative_slope={negative_slope}; served is 0.01")
        return None
    return _leaky(buffers, input, inplace)


def _wants(x: Tensor, *parameters: Tensor | None) -> bool:
    return x.requires_grad or any(p is not None and p.requires_grad for p in parameters)


def _ends_in(input: Tensor, shape: Any) -> bool:
    return 0 < len(shape) <= input.dim() and input.shape[-len(shape) :] == torch.Size(shape)


def _layer_norm(
    buffers: Buffers,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    if not (_large(input) and _wants(input, weight, bias) and _ends_in(input, normalized_shape)):
        return None
    buffers.serve("layer_norm", FORMATS["norm"])
    return _hotrain.norm(input, weight, bias, "layer", len(normalized_shape), eps, FORMATS["norm"])


def _rms_norm(
    buffers: Buffers,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor | None:
    if not (_large(input) and _wants(input, weight) and _ends_in(input, normalized_shape)):
        return None
    buffers.serve("rms_norm", FORMATS["norm"])
    if eps is None:
        eps = torch.finfo(backward.wide(input.dtype)).eps
    return _hotrain.norm(input, weight, None, "rms", len(normalized_shape), eps, FORMATS["norm"])


def _group_norm(
    buffers: Buffers,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    if not (_large(input) and input.dim() >= 3 and _wants(input, weight, bias)):
        return None
    buffers.serve("group_norm", FORMATS["norm"])
    return _hotrain.norm(input, weight, bias, "group", num_groups, eps, FORMATS["norm"])


def _batch_norm(
    buffers: Buffers,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    if not (_large(input) and _wants(input, weight, bias)):
        return None
    if not training:
        buffers.leave("batch_norm", "it normalises with running statistics; served are those of the batch")
        return None
    if input.dim() < 3:
        return None
    if input.numel() == input.shape[1]:  # one value a channel, which PyTorch refuses
        return None
    buffers.serve("batch_norm", FORMATS["norm"])
    return _hotrain.norm(input, weight, bias, "batch", 1, eps, FORMATS["norm"], running_mean, running_var, momentum)


def _softmax(
    buffers: Buffers, input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> Tensor | None:
    if not (_large(input) and input.requires_grad) or dim is None:
        return None
    buffers.serve("softmax", FORMATS["softmax"])
    return _hotrain.kept_softmax(input if dtype is None else input.to(dtype), dim, FORMATS["softmax"])


def _tensor_softmax(buffers: Buffers, input: Tensor, dim: int, dtype: Any = None) -> Tensor | None:
    return _softmax(buffers, input, dim, dtype=dtype)


def _dropout(
    buffers: Buffers, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor | None:
    if not (training and 0 < p <= 1 and _large(input) and input.requires_grad):
        return None
    buffers.serve("dropout", "bits")
    y = _hotrain.kept_dropout(input, p)
    return input.copy_(y) if inplace else y


def _forms(a: Tensor, b: Tensor, form: str) -> tuple[str, str] | None:
    """How the factors of a product are kept, None where neither is large and asked for by the other's gradient."""
    large_a, large_b = _large(a) and b.requires_grad, _large(b) and a.requires_grad
    return (form if large_a else "exact", form if large_b else "exact") if large_a or large_b else None


def _product(buffers: Buffers, input: Any, other: Any) -> Tensor | None:
    a, b = input, other
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.dtype.is_complex or b.dtype.is_complex:
        return None
    forms = _forms(a, b, FORMATS["product"])
    if forms is None:
        return None
    buffers.serve("mul", FORMATS["product"])
    return _hotrain.product(a, b, *forms)


def _matmul(buffers: Buffers, input: Any, other: Any) -> Tensor | None:
    a, b = input, other
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.is_floating_point() and b.is_floating_point()):
        return None
    forms = _forms(a, b, FORMATS["matmul"])
    if forms is None:
        return None
    if a.dim() < 3 or b.dim() < 3:
        buffers.leave("matmul", "one operand is a matrix or a vector; served are batches of matrices")
        return None
    buffers.serve("matmul", FORMATS["matmul"])
    return _hotrain.kept_matmul(a, b, *forms)


def _bmm(buffers: Buffers, input: Any, mat2: Any, out_dtype: Any = None) -> Tensor | None:
    # What `matmul` broadcasts and `bmm` refuses must stay refused.
    fits = isinstance(input, Tensor) and isinstance(mat2, Tensor) and input.dim() == mat2.dim() == 3
    if out_dtype is not None or not fits or input.shape[0] != mat2.shape[0]:
        return None
    return _matmul(buffers, input, mat2)


def _linear(buffers: Buffers, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    if not (_large(input) and input.dim() > 2 and weight.dim() == 2 and weight.requires_grad):
        return None
    buffers.serve("linear (exact product)", FORMATS["linear"])
    return _hotrain.kept_linear(input, weight, bias, FORMATS["linear"])


def _pair(value: Any) -> list[int]:
    pair = list(value) if isinstance(value, tuple | list) else [value]
    return pair * 2 if len(pair) == 1 else pair


def _step(stride: Any, kernel: list[int]) -> list[int]:
    return kernel if stride is None or stride in ([], ()) else _pair(stride)


def _conv2d(
    buffers: Buffers,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    if not (_large(input) and input.dim() == 4 and _wants(input, weight)):
        return None
    if input.shape[1] < 16 and weight.requires_grad:
        return None
    if isinstance(padding, str):
        buffers.leave("conv2d", f"padding={padding!r}; served are numbers")
        return None
    buffers.serve("conv2d (exact product)", FORMATS["conv"])
    return _hotrain.kept_conv2d(
        input, weight, bias, _pair(stride), _pair(padding), _pair(dilation), groups, FORMATS["conv"]
    )


def _max_pool2d(
    buffers: Buffers,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    if not (_large(input) and input.dim() == 4 and input.requires_grad) or return_indices:
        return None
    kernel = _pair(kernel_size)
    if _pair(dilation) != [1, 1] or kernel[0] * kernel[1] > 256:
        buffers.leave("max_pool2d", "dilated, or windows of more than 256 entries")
        return None
    buffers.serve("max_pool2d", "one byte an output")
    return _hotrain.kept_max_pool2d(input, kernel, _step(stride, kernel), _pair(padding), ceil_mode)


def _avg_pool2d(
    buffers: Buffers,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor | None:
    if not (_large(input) and input.dim() == 4 and input.requires_grad):
        return None
    buffers.serve("avg_pool2d", "nothing")
    kernel = _pair(kernel_size)
    return _hotrain.kept_avg_pool2d(
        input, kernel, _step(stride, kernel), _pair(padding), ceil_mode, count_include_pad, divisor_override
    )


def _attention(
    buffers: Buffers,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    if not _large(query) or not (query.requires_grad or key.requires_grad or value.requires_grad):
        return None
    q, k, v = map(autograd.autocast, (query, key, value))
    mask = attn_mask
    if mask is not None and mask.is_floating_point():
        mask = autograd.autocast(mask)
    kind = backend(q, k, v, mask, dropout_p, is_causal)
    if kind is None or (q.dim() == 4 and q.shape[1] != k.shape[1] and not enable_gqa):
        buffers.leave("scaled_dot_product_attention", "no fused kernel runs it here")
        return None
    buffers.serve("scaled_dot_product_attention", f"{FORMATS['query_key']}, {FORMATS['value_output']}")
    if mask is not None and mask.dtype != torch.bool:
        mask = prepared_mask(mask, q, k, kind)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return _hotrain.kept_attention(
        q, k, v, mask, dropout_p, is_causal, scale, kind, FORMATS["query_key"], FORMATS["value_output"]
    )


def _full(what: str, why: str) -> Callable[..., None]:
    """A handler that serves nothing and says so, of large tensors."""

    def run(buffers: Buffers, *args: Any, **kwargs: Any) -> None:
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        if tensors and _large(tensors[0]) and _wants(*tensors):
            buffers.leave(what, why)

    return run


_adaptive = _full("interpolate", 'mode="area" keeps its input; other modes keep nothing')


def _interpolate(
    buffers: Buffers,
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    *args: Any,
    **kwargs: Any,
) -> None:
    if mode == "area":
        _adaptive(buffers, input)


TABLE: dict[Any, Callable[..., Tensor | None]] = {
    F.gelu: _gelu,
    F.leaky_relu: _leaky_relu,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,  # what Dynamo makes of it
    F.group_norm: _group_norm,
    F.batch_norm: _batch_norm,
    F.softmax: _softmax,
    torch.softmax: _tensor_softmax,
    Tensor.softmax: _tensor_softmax,
    F.dropout: _dropout,
    F.linear: _linear,
    F.conv2d: _conv2d,
    F.max_pool2d: _max_pool2d,
    torch.max_pool2d: _max_pool2d,
    F.avg_pool2d: _avg_pool2d,
    F.scaled_dot_product_attention: _attention,
    **dict.fromkeys((torch.mul, torch.multiply, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, operator.mul), _product),
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, operator.matmul), _matmul),
    **dict.fromkeys((torch.bmm, Tensor.bmm), _bmm),
    F.multi_head_attention_forward: _full("multi_head_attention_forward", "PyTorch runs all of it in one call"),
    F.interpolate: _interpolate,
    F.glu: _full("glu", "it keeps its input; no operator serves it"),
    **dict.fromkeys(
        (F.log_softmax, torch.log_softmax, Tensor.log_softmax),
        _full("log_softmax", "it keeps its result; no operator serves it"),
    ),
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu), _activation("relu")),
    **dict.fromkeys((F.sigmoid, torch.sigmoid, Tensor.sigmoid), _activation("sigmoid")),
    **dict.fromkeys((F.tanh, torch.tanh, Tensor.tanh), _activation("tanh")),
    **{getattr(F, name): _activation(name) for name in ("silu", "mish", "hardswish", "relu6", "hardsigmoid")},
}

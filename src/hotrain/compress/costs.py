"""What an operator of a compiled graph costs more than what exact training runs in its place: measured on its device.

The operator runs alone, on random data, as a CUDA graph, in turns with a copy of the bytes that exact training moves
there: where other work slows the device down, it slows both. Where nothing can be measured, both are bytes over the
roof of copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from ..planning import Roofs, agreed, captured, fastest
from ..private import no_dispatch_modes
from .nodes import arguments_of, bytes_of, readers_of, result_of

_EFFICIENCY = 0.85  # of the roof of copies, that compiled formulas reach
_OF_STATISTICS = 0.56  # that their sums over an image's pixels reach: ResNet-50 and DenseNet-121, on an H200
_OF_SMOOTH = 0.56  # that a norm's SiLU or hardswish reaches: EfficientNet-B0 and MobileNetV3-L, on an H200
_OF_ERF = 0.66  # that GELU reaches: ViT-B, DeiT-S, ConvNeXt-T and Swin-T, on an H200
_OF_ITS_SLOPE = 0.72  # that its gradient reaches: DeiT-S (0.69), PiT-S (0.73), CoaT-Lite-S and ViTamin-S (0.75)
_WITH_SUMS = 1.15  # of the time alone of an activation's gradient that `fusing` lets sum for a bias: DeiT-S and PiT-S
_CALLS = 4  # in one CUDA graph, so that its launch counts little
_MOST_COPIED = 1 << 27  # bytes read, and written: larger copies take proportionally longer, or wait for other work

_aten, _ops = torch.ops.aten, torch.ops.hotrain
_measured: dict[str, tuple[float, float] | None] = {}


def _norm_forward(node: Node) -> int:
    args, (_, y, *_) = node.args, node.meta["val"]
    return bytes_of(args[0]) + bytes_of(args[1]) + bytes_of(y)


def _norm_backward(node: Node) -> int:
    g, (g_x, *_) = node.args[0], node.meta["val"]
    return bytes_of(g) + 2 * bytes_of(g_x)  # x is of g_x's dtype


def _activation_gradient(node: Node) -> int:
    """The layer before sums the result for its bias, which `fusing` makes a part of the operator."""
    return (3 + _is_summed(node)) * bytes_of(node.args[0])


def _is_summed(node: Node) -> bool:
    """Whether an operator's first result is summed, as it is or as a matrix."""
    result = result_of(node, 0)
    return result is not None and any(user.target is _aten.sum.dim_IntList for user in readers_of(result))


def _norm_gradient(node: Node) -> int:
    """Two passes over g, x, and the activation's result; then g_x is written, and the shortcut's gradient.

    A gradient that is added to g is read in its first pass; what is written for the shortcut is read in its second.
    """
    g, other, *_, name, passes_on, _, after = arguments_of(node)
    g_x, *_ = node.meta["val"]
    again = 1 if passes_on or other is None else 2
    moved = (2 + 2 * bool(name) + bool(passes_on)) * bytes_of(g) + 3 * bytes_of(g_x)  # x is of g_x's dtype
    return moved + again * bytes_of(other) + bytes_of(after)


# Operator → bytes that exact training moves in its place; codes are packed and unpacked in no one's place.
_EXACT: dict[Any, Callable[[Node], int]] = {
    _ops.norm_forward.default: _norm_forward,
    _ops.norm_backward.default: _norm_backward,
    _ops.activate.default: lambda node: 2 * bytes_of(node.args[0]),
    _ops.activation_gradient.default: _activation_gradient,
    _ops.gated_gradient.default: lambda node: 5 * bytes_of(node.args[0]),  # reads g_y, x and b, writes both gradients
    _ops.channel_statistics.default: lambda node: bytes_of(node.args[0]),
    _ops.normalize.default: lambda node: sum(map(bytes_of, (node.args[0], node.args[5], node.meta["val"][0]))),
    _ops.norm_gradient.default: _norm_gradient,
    _ops.keep_codes.default: lambda node: 0,
    _ops.restore_codes.default: lambda node: 0,
}
STATISTICS = _ops.channel_statistics.default
_NORMS, _SMOOTH = (_ops.normalize.default, _ops.norm_gradient.default), ("silu", "hardswish")
REPLACING = tuple(target for target in _EXACT if target not in (
    _ops.keep_codes.default, _ops.restore_codes.default, STATISTICS,
))  # fmt: skip
"""Operators that replace exact ones and pack what these save."""


def excess(node: Node, roofs: Roofs) -> float:
    """ms that one call of an operator of `_EXACT`, of static shapes, takes longer than exact training; it may gain."""
    nbytes = _EXACT[node.target](node)
    key = f"{node.target} {map_arg(node.args, _described)} {nbytes}"
    if key not in _measured:
        own = _in_turns(node, nbytes) if _device(node).type == "cuda" else None
        _measured[key] = agreed(f"cost {key}", own)
    found = _measured[key]
    if found is None:
        inputs = sum(map(bytes_of, dict.fromkeys(node.all_input_nodes)))
        results = node.meta["val"] if isinstance(node.meta["val"], tuple | list) else [node.meta["val"]]
        found = 1e3 * (inputs + sum(map(bytes_of, results))) / roofs.copy, 1e3 * nbytes / roofs.copy
    sums = node.target is _ops.activation_gradient.default and _is_summed(node)
    return (_WITH_SUMS if sums else 1.0) * found[0] - found[1] / _efficiency(node)


def _efficiency(node: Node) -> float:
    """Of the roof of copies, what the compiled formula reaches that an operator replaces."""
    if node.target is STATISTICS:
        return _OF_STATISTICS
    if node.target in _NORMS and any(name in node.args for name in _SMOOTH):
        # Backward computes the result again for the product behind, where a ReLU's is saved.
        return _OF_SMOOTH
    if "gelu" not in node.args:
        return _EFFICIENCY
    return _OF_ITS_SLOPE if node.target is _ops.activation_gradient.default else _OF_ERF


def _device(node: Node) -> torch.device:
    values = [n.meta["val"] for n in node.all_input_nodes]
    return next(t.device for t in values if isinstance(t, Tensor))


def _described(node: Node) -> Any:
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return value
    return f"{value.dtype}{list(value.shape)}{list(value.stride())}"


def _random(node: Node) -> Any:
    """A tensor like the node's, with the same memory layout."""
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return value
    own = [1 if stride == 0 else size for size, stride in zip(value.shape, value.stride(), strict=True)]
    t = torch.empty_strided(own, value.stride(), dtype=value.dtype, device=value.device)
    t = t.normal_() if value.is_floating_point() else t.random_(0, 2 if value.dtype == torch.bool else 100)
    return t.expand(value.shape)


def _sets(make: Callable[[], Any], nbytes: int, device: torch.device) -> list[Any]:
    """What each of `_CALLS` calls takes: their own of so many bytes, or the same where it does not fit the cache.

    In a step other operators run between two calls, so that none finds in the cache what the one before has read.
    """
    count = _CALLS if nbytes < 2 * torch.cuda.get_device_properties(device).L2_cache_size else 1
    return [make() for _ in range(count)] * (_CALLS // count)


def _in_turns(node: Node, nbytes: int) -> tuple[float, float] | None:
    """ms of the operator, and of a copy that reads and writes so many bytes; None where that cannot be measured."""
    device = _device(node)
    half = min(max(nbytes // 2, 1), _MOST_COPIED)

    def works() -> list[Callable[[], object]]:
        target: Any = node.target
        read = sum(map(bytes_of, dict.fromkeys(node.all_input_nodes)))
        given = _sets(lambda: map_arg(node.args, _random), read, device)
        own = lambda: [target(*args) for args in given]  # noqa: E731
        if not nbytes:
            return [own]
        copied = _sets(lambda: torch.empty(2, half, dtype=torch.uint8, device=device).random_(), 2 * half, device)
        return [own, lambda: [place.copy_(source) for place, source in copied]]

    found = alone(device, works)
    if found is None:
        return None
    own_ms, copy_ms = (*found, 0.0)[:2]
    return own_ms / _CALLS, copy_ms / _CALLS * max(nbytes // 2, 1) / half


def alone(device: torch.device, works: Callable[[], Sequence[Callable[[], object]]]) -> tuple[float, ...] | None:
    """ms of each work of a CUDA device, as CUDA graphs, in turns; None where that cannot be measured.

    ``works`` makes them and what they read; what these draw is not of the user's generators.
    """
    if torch.cuda.is_current_stream_capturing():
        return None
    try:
        with no_dispatch_modes(), torch.no_grad(), torch.cuda.device(device), torch.random.fork_rng([device]):
            made = works()
            for work in made:
                work()
            return fastest([captured(work) for work in made])
    except RuntimeError:  # out of memory, or an operator that does not run alone: training goes on without it
        return None

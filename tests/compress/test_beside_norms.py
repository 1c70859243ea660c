"""What is beside a layer or RMS norm costs more than in exact training, where a compiler fuses it with the norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

import hotrain
from hotrain.compress import fusing

assert hotrain
ROWS, CHANNELS = 48, 64
FLAT = torch.float32, torch.float32, True, False  # dtypes of the sum and of y; centered; without a cast
FORWARD = torch.ops.hotrain.norm_forward.default
BACKWARD = torch.ops.hotrain.norm_backward.default


def joint(
    behind: Callable[[Tensor], Tensor] = lambda y: y, gradient: Callable[[Tensor], Tensor] = lambda g: g
) -> Graph:
    """Forward and backward of one norm, traced."""

    def step(x: Tensor, g: Tensor) -> list[Tensor]:
        _, y, r, *kept = torch.ops.hotrain.norm_forward(x, None, None, None, 1e-5, *FLAT, False, None, None, 1.0)
        given = gradient(g), *kept[:2], r, kept[2], None
        grads = torch.ops.hotrain.norm_backward(*given, *FLAT[1:3], None, None, 1.0)
        return [behind(y), *grads[:2]]

    x, g = (torch.randn(ROWS, CHANNELS) for _ in range(2))
    return make_fx(step, tracing_mode="fake")(x, g).graph


def joint_with_a_shortcut(cast: bool) -> Graph:
    """Backward of a norm whose gradient is added to a shortcut's, and then cast for a product, or not."""

    def step(g: Tensor, other: Tensor, *kept: Tensor) -> list[Tensor]:
        g_x, sums, _ = torch.ops.hotrain.norm_backward(g, *kept, None, *FLAT[1:3], None, None, 1.0)
        total = g_x + other
        return [total, total.to(torch.bfloat16) if cast else total.sin(), sums]

    g, other = (torch.randn(ROWS, CHANNELS) for _ in range(2))
    codes = torch.zeros(ROWS, 1, CHANNELS // 2, dtype=torch.uint8)
    scale = torch.ones(ROWS, 1, 1, dtype=torch.bfloat16)
    return make_fx(step, tracing_mode="fake")(g, other, codes, scale, torch.ones(ROWS), torch.ones(2, CHANNELS)).graph


def one_of(graph: Graph, target: Any) -> Any:
    (node,) = graph.find_nodes(op="call_function", target=target)
    return node


def windows(t: Tensor) -> Tensor:
    """Rows in another order, as windows of an image have them: a copy."""
    return t.view(4, 3, 4, CHANNELS).transpose(1, 2).contiguous().view(ROWS, CHANNELS)


def test_copies_into_windows_count() -> None:
    """A compiler's own norm writes and reads them in passing; beside a kernel each is read and written once more."""
    size = ROWS * CHANNELS * 4
    for behind, gradient, wanted in ((None, None, (0, 0)), (windows, None, (2, 0)), (None, windows, (0, 2))):
        options = {name: f for name, f in (("behind", behind), ("gradient", gradient)) if f is not None}
        graph = joint(**options)
        found = fusing.unfused(one_of(graph, FORWARD)), fusing.unfused(one_of(graph, BACKWARD))
        assert found == tuple(number * size for number in wanted)


def test_a_cast_of_the_shortcuts_gradient_is_time_gained() -> None:
    """Exact training reads it in float32 and writes it in bfloat16 again; our kernel writes both. A sine is read."""
    size = ROWS * CHANNELS
    found = [fusing.unfused(one_of(joint_with_a_shortcut(cast), BACKWARD)) for cast in (True, False)]
    assert found == [-(4 + 2) * size, 4 * size]

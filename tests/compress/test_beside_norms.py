"""What is beside a layer or RMS norm costs more than in exact training, where a compiler fuses it with the norm."""

from __future__ import annotations

import functools
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


def joint(behind: Callable[[Tensor], Any] = lambda y: y, gradient: Callable[[Tensor], Tensor] = lambda g: g) -> Graph:
    """Forward and backward of one norm, traced."""

    def step(x: Tensor, g: Tensor) -> list[Any]:
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
    cases = (None, None, (0, 0)), (windows, None, (2, 0)), (None, windows, (0, 2)), (torch.sin, None, (2, 0))
    for behind, gradient, wanted in (*cases, (lambda y: [y.sin(), y @ y.mT], None, (1, 0))):
        options = {name: f for name, f in (("behind", behind), ("gradient", gradient)) if f is not None}
        graph = joint(**options)
        found = fusing.unfused(one_of(graph, FORWARD)), fusing.unfused(one_of(graph, BACKWARD))
        assert found == tuple(number * size for number in wanted)


def test_a_cast_of_the_shortcuts_gradient_is_time_gained() -> None:
    """Exact training reads it in float32 and writes it in bfloat16 again; our kernel writes both. A sine is read."""
    size = ROWS * CHANNELS
    found = [fusing.unfused(one_of(joint_with_a_shortcut(cast), BACKWARD)) for cast in (True, False)]
    assert found == [-(4 + 2) * size, 4 * size]


IMAGE = 2, CHANNELS, 6, 4
PIXELS = 2 * CHANNELS * 6 * 4 * 4  # bytes of an image
NORMALIZE, GRADIENT = torch.ops.hotrain.normalize, torch.ops.hotrain.norm_gradient


def image_step(behind: Callable[[Tensor], Any], gradient: Callable[[Tensor], Tensor], count: int = 1) -> Graph:
    """Batch norm with its gradient, in a graph; `count` gradients of one g."""

    def step(x: Tensor, g: Tensor, one: Tensor) -> list[Any]:
        y, *kept = NORMALIZE(x, one, one, None, None, None, "")
        g = gradient(g)
        return [behind(y), *(GRADIENT(g, None, *kept, one, one, "", False)[1] for _ in range(count))]

    x, g = (torch.randn(IMAGE).contiguous(memory_format=torch.channels_last) for _ in range(2))
    return make_fx(step, tracing_mode="fake")(x, g, torch.ones(CHANNELS)).graph


def pooled(t: Tensor) -> Tensor:
    """What no formula is, and is not fused."""
    return torch.nn.functional.avg_pool2d(t, 2)


def pooled_like(t: Tensor) -> Tensor:
    return torch.nn.functional.max_pool2d(t, 3, 1, 1)


def shortcut(y: Tensor) -> Tensor:
    """Of a batch norm behind a branch."""
    one = torch.ones(CHANNELS)
    return pooled(NORMALIZE(pooled_like(y), one, one, None, None, y, "")[0])


def test_what_a_compiler_fuses_with_batch_norm_counts() -> None:
    """A result that formulas alone read is not written in exact training; of one that others read as well, a formula
    has it in registers, unless it waits for what they make of it."""
    for behind, wanted in (
        (pooled, 0),
        (torch.sin, 2),
        (lambda y: [torch.sin(y), pooled(y)], 1),
        (lambda y: y * pooled(y).mean(), 0),
        (shortcut, 0),
    ):
        graph = image_step(behind, lambda g: g)
        first = graph.find_nodes(op="call_function", target=NORMALIZE.default)[0]
        assert fusing.unfused(first) == wanted * PIXELS


def test_gradients_that_a_compiler_reads_once_count() -> None:
    """Of one g for three batch norms exact training makes all sums in one pass; a formula's g it does not write."""
    for gradient, count, wanted in ((None, 1, 0.0), (None, 3, 4.0), (torch.sin, 1, 1.0), (pooled_like, 1, 0.0)):
        graph = image_step(pooled, gradient or (lambda g: g), count)
        found = sum(map(fusing.unfused, graph.find_nodes(op="call_function", target=GRADIENT.default)))
        assert found == wanted * PIXELS


def test_a_function_of_a_formula_counts() -> None:
    """Exact training applies it in registers; what a product has made is in memory there, too."""
    made: dict[Callable[[Tensor], Tensor], int] = {torch.sin: 2, lambda t: t @ t.mT @ t: 0}
    for before, wanted in made.items():
        step = functools.partial(lambda f, t: torch.ops.hotrain.activate(f(t), "gelu", "int8", None)[0], before)
        graph = make_fx(step, tracing_mode="fake")(torch.randn(ROWS, CHANNELS)).graph
        (node,) = graph.find_nodes(op="call_function", target=torch.ops.hotrain.activate.default)
        assert fusing.unfused(node) == wanted * ROWS * CHANNELS * 4


def test_what_a_gate_reads_counts() -> None:
    """A gate reads an activation in registers in exact training, and its gradient, too; a product reads both from
    memory. What packs the activation reads it as well, which counts where it packs."""

    def step(x: Tensor, b: Tensor, g: Tensor, gated: bool) -> list[Any]:
        y, *kept = torch.ops.hotrain.activate(x, "gelu", "int8", None)
        g_y = g * b if gated else g @ b.mT @ b
        g_x, _ = torch.ops.hotrain.activation_gradient(g_y, *kept[:2], "gelu", "int8", False)
        return [y * b if gated else y @ b.mT, torch.ops.hotrain.keep_codes(y, "int4 nearest"), g_x]

    for gated, wanted in ((True, 2.0), (False, 0.0)):
        given = (torch.randn(ROWS, CHANNELS) for _ in range(3))
        graph = make_fx(functools.partial(step, gated=gated), tracing_mode="fake")(*given).graph
        for name in ("activate", "activation_gradient"):
            node = one_of(graph, getattr(torch.ops.hotrain, name).default)
            assert fusing.unfused(node) == wanted * ROWS * CHANNELS * 4

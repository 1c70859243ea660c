"""What is beside a layer or RMS norm costs more than in exact training, where a compiler fuses it with the norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import hotrain
from hotrain.compress import fusing
from hotrain.planning import Roofs

assert hotrain
ROWS, CHANNELS, EPS = 48, 64, 1e-5
ROOFS = Roofs(copy=4e12, product=7e14)
FORWARD = torch.ops.hotrain.norm_forward.default
BACKWARD = torch.ops.hotrain.norm_backward.default


def joint(
    centered: bool,
    cast: bool = False,
    affine: bool = True,
    dtype: torch.dtype = torch.float32,
    behind: Callable[[Tensor], Tensor] = lambda y: y,
    gradient: Callable[[Tensor], Tensor] = lambda g: g,
) -> tuple[GraphModule, list[Tensor]]:
    """Forward and backward of one norm, traced, and random arguments."""
    x, g = (torch.randn(ROWS, CHANNELS, dtype=dtype) for _ in range(2))
    w, b = (torch.randn(CHANNELS) if affine else None for _ in range(2))
    b = b if centered else None

    def step(x: Tensor, g: Tensor, *rest: Tensor) -> list[Tensor]:
        terms = iter(rest)
        mine, bias = next(terms, None), next(terms, None)
        options = EPS, dtype, dtype, centered, cast, False, None, None, 1.0
        _, y, r, codes, scale = torch.ops.hotrain.norm_forward(x, None, mine, bias, *options)
        rows = gradient(g)
        grads = torch.ops.hotrain.norm_backward(rows, codes, scale, r, mine, None, dtype, centered, None, None, 1.0)
        return [behind(y), *grads[:2]]

    given = [x, g, *(t for t in (w, b) if t is not None)]
    return make_fx(step, tracing_mode="fake")(*given), given


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
        graph = joint(True, **options)[0].graph  # type: ignore[arg-type]
        found = fusing.unfused(one_of(graph, FORWARD)), fusing.unfused(one_of(graph, BACKWARD))
        assert found == tuple(number * size for number in wanted)

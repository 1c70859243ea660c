"""Layer and RMS norms that a plan keeps exact: both directions are the formulas, and their costs count what is beside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import hotrain
from hotrain.compress import choosing, exact_norms, fusing
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


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize(("centered", "cast"), [(True, False), (False, False), (False, True)])
def test_put_back_it_is_exact(centered: bool, cast: bool, affine: bool) -> None:
    """As float64's autograd to float32's rounding: 4-bit codes are off by a tenth."""
    gm, (x, g, *rest) = joint(centered, cast, affine)
    ((norm, gradient),) = exact_norms.row_pairs(gm.graph)
    exact_norms.put_rows_back(gm.graph, norm, gradient)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    assert not gm.graph.find_nodes(op="call_function", target=FORWARD)
    assert not gm.graph.find_nodes(op="call_function", target=BACKWARD)
    leaves = [t.double().requires_grad_() for t in (x, *rest)]
    w, b = (*leaves[1:], None, None)[:2]
    wanted = F.layer_norm(leaves[0], (CHANNELS,), w, b, EPS) if centered else F.rms_norm(leaves[0], (CHANNELS,), w, EPS)
    g_x, *of_weights = torch.autograd.grad(wanted, leaves, g.double())
    y, got, sums = gm(x, g, *rest)
    torch.testing.assert_close(y.double(), wanted.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.double(), g_x, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(sums.flip(0), of_weights, strict=False):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4)


def test_a_reader_of_the_codes_keeps_it() -> None:
    """A layer whose x is made from the norm's codes needs them."""
    gm, _ = joint(True)
    codes = next(part for part in one_of(gm.graph, FORWARD).users if part.args[1] == 3)
    output: Any = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        read = gm.graph.call_function(torch.ops.aten.neg.default, (codes,))
    output.update_arg(0, [*output.args[0], read])
    assert not list(exact_norms.row_pairs(gm.graph))


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


def test_a_plan_without_time_keeps_it_exact() -> None:
    """Where copies beside it cost more than its kernels gain; with time left it stays."""
    for gains, kept in ((-1e3, 1), (1e3, 0)):
        gm, _ = joint(True, behind=windows, gradient=windows)
        assert choosing.choose(gm.graph, ROOFS, gains)[0]["norm"] == (kept, 1)
        assert len(gm.graph.find_nodes(op="call_function", target=FORWARD)) == 1 - kept

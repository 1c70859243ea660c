"""Keys and values with a part common to all tokens, as biases give them: it takes the range of codes, and need not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hotrain import autograd, kernels
from hotrain.compress.interpose import Compressed
from hotrain.compress.operators import attention
from hotrain.compress.report import Buffers
from hotrain.quantize.channels import OF_MIDDLES, STRIDE, middles
from hotrain.saved import Grouped

pytestmark = [
    pytest.mark.usefixtures("small_tensors_too"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, in the interpreter, of infinities and NaN
]
BATCH, TOKENS, HEADS, WIDTH = 2, 48, 4, 32
OFFSET = 20.0  # of deviations
Function = Callable[..., Tensor]


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(autograd, "KERNELS", dict.fromkeys(("cpu", "cuda"), kernels))


def inputs(
    of_k: float, of_v: float, samples: int = BATCH, heads: int = HEADS, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """q, k and v, (B, H, T, D), and g, the same of each offset but for that; those of k and v are of each channel.

    The first ``samples`` have them, the others have none.
    """
    torch.manual_seed(0)
    q, g = (torch.randn(BATCH, TOKENS, HEADS, WIDTH) for _ in range(2))
    k, v = (torch.randn(BATCH, TOKENS, heads, WIDTH) for _ in range(2))
    signs = torch.randn(2, heads, WIDTH).sign()
    k[:samples] += of_k * signs[0]
    v[:samples] += of_v * signs[1]
    return [t.to(dtype).transpose(1, 2) for t in (q, k, v, g)]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=k.shape[1] < q.shape[1])


def gradients(run: Function, tensors: list[Tensor], compressing: bool = True) -> list[Tensor]:
    q, k, v, g = tensors
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]

    def call() -> Tensor:
        if not compressing:
            return run(*leaves)
        with Compressed(Buffers()):
            return run(*leaves)

    return [t.double() for t in torch.autograd.grad(call(), leaves, g)]


def errors(run: Function, tensors: list[Tensor]) -> list[float]:
    """The largest of a row, relative to the rows' mean size, for q, k and v."""
    want = gradients(attend, [t.double() for t in tensors], compressing=False)
    found = gradients(run, tensors)
    return [float((a - b).norm(dim=-1).max() / b.norm(dim=-1).mean()) for a, b in zip(found, want, strict=True)]


def both(run: Function, **options: Any) -> None:
    without = errors(run, inputs(0, 0, **options))
    assert max(without) < 0.9, "what int4 of v costs"
    for offsets in ((OFFSET, 0), (0, OFFSET), (OFFSET, OFFSET), (OFFSET, OFFSET, 1)):
        found = errors(run, inputs(*offsets, **options))
        assert all(a < 1.5 * b for a, b in zip(found, without, strict=True)), (offsets, found, without)


@pytest.mark.parametrize("heads", [HEADS, 2])
def test_no_row_is_lost(heads: int) -> None:
    both(attend, heads=heads)


@pytest.mark.parametrize("heads", [HEADS, 2])
def test_no_row_is_lost_by_kernels(heads: int, by_kernels: None) -> None:
    both(attend, heads=heads)


def test_no_row_is_lost_compiled() -> None:
    torch._dynamo.reset()
    both(torch.compile(attend, backend="aot_eager"))
    torch._dynamo.reset()


def test_half_precision_by_kernels(by_kernels: None) -> None:
    """Differences of two numbers of float16 may exceed it, in the kernel and in the formula."""
    q, k, v, _ = inputs(0, 0, dtype=torch.float16)
    k[:, :, :, 3], k[:, :, 5, 3] = 60000, -60000
    tensors = [t.transpose(1, 2) for t in (q, k, v, q)]
    middle = middles(tensors[1:3])
    assert (middle[0, :, :, 3] > 50000).all()
    kept = attention._keep_heads(tensors, "int8", "int4 nearest", middle)
    want = attention._packed_by_formula(tensors, ("int8", "int4 nearest"), middle, attention.pack)
    torch.testing.assert_close(kept[3], want[3], rtol=2**-7, atol=0)
    assert (kept[2].int() - want[2].int()).abs().max() <= 1
    back = attention._unpack_four(("int8", "int4 nearest"), kept, [t.shape for t in tensors], torch.float16)
    assert all(t.isfinite().all() for t in back)


def restored(bits: int, kept: list[Tensor], t: Tensor) -> Tensor:
    return Grouped(bits).restore(kept, t.shape, t.dtype)


@pytest.mark.parametrize("by", ["formula", "kernels"])
def test_dropout_leaves_v(by: str, request: pytest.FixtureRequest) -> None:
    """There backward reads forward's output, of which a constant in v is a part."""
    if by == "kernels":
        request.getfixturevalue("by_kernels")
    _, k, v, _ = tensors = [t.transpose(1, 2) for t in inputs(OFFSET, OFFSET)]
    forms = "int8", "int4 nearest"
    kept = [attention._pack_four(tensors, forms, dropout) for dropout in (0.1, 0.0)]
    (k_under, v_under), (k_without, v_without) = (
        (restored(8, codes[2:4], k), restored(4, codes[4:6], v)) for codes in kept
    )
    assert v_under.abs().mean() > 15
    assert all(t.abs().mean() < 2 for t in (k_under, k_without, v_without))


def test_middles() -> None:
    assert OF_MIDDLES * STRIDE < 2**31, "Inductor computes it as an index, in int32"
    torch.manual_seed(0)
    t = torch.randn(3, 40, 2, 16) + 5
    found = middles([t, t + 1])
    assert found.shape == (2, 3, 2, 16)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[1], found[0] + 1)
    assert (found[0] - 5).abs().max() < 4 / 14**0.5
    for other in (t.mT.contiguous().mT, t.movedim(2, 0).contiguous().movedim(0, 2), t.double()):
        torch.testing.assert_close(middles([other]), found[:1])
    t[0, 0, 1, 2], t[0, 0, 0, 3] = 1e6, -1e6  # the first token is always one of them
    torch.testing.assert_close(middles([t]), found[:1], rtol=0, atol=0.5)
    t[0, 0, 1, 2], t[0, 0, 0, 3] = float("nan"), float("inf")
    assert (middles([t])[0] == 0).nonzero().tolist() == [[0, 0, 3], [0, 1, 2]]
    for size in (1, 2, 3):
        few = torch.full((2, size, 2, 4), 7.0)
        few[1] = -3
        torch.testing.assert_close(middles([few])[0], few[:, 0], msg="as many tokens as there are, of each sample")


def test_keys_that_are_not_finite() -> None:
    """Their group alone is not finite in backward, in other tokens nothing is."""
    tensors = [t.transpose(1, 2) for t in inputs(0, 0)]
    tensors[1][0, 0, 1, 3] = float("nan")
    codes = attention._pack_four(tensors, ("int8", "int4 nearest"), 0.0)
    finite = restored(8, codes[2:4], tensors[1]).isfinite()
    assert not finite[0, 0, 1].any()
    assert int(finite.logical_not().sum()) == WIDTH

"""The kernels of cross entropy over many classes against float64."""

from __future__ import annotations

import pytest
import torch

from hotrain.kernels import head

pytestmark = pytest.mark.usefixtures("poison")
# of the dtype's rounding of the result (the interpreter truncates), and of float32's exponential and sums
ERROR = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def padded(y: torch.Tensor) -> torch.Tensor:
    """The same values with columns behind them that no kernel may read, as of a padded product."""
    return torch.nn.functional.pad(y, (0, 7), value=torch.nan)


# less than a block, an odd number as GPT-2 has, exactly one block, blocks and a rest
@pytest.mark.parametrize("classes", [3, 1001, 4096, 9000])
@pytest.mark.parametrize("dtype", ERROR)
def test_normalizers(classes: int, dtype: torch.dtype, device: torch.device) -> None:
    """Rows of any height: exponentials of the largest are 1."""
    y = (
        4 * torch.randn(5, classes, device=device)
        + torch.tensor([0.0, 80.0, -80.0, 300.0, -300.0], device=device)[:, None]
    )
    y = y.to(dtype)
    want = y.double().logsumexp(1)
    for given in (y, padded(y)):
        assert torch.allclose(head.normalizer(given, classes).double(), want, rtol=2e-6, atol=2e-6)


def test_infinite_and_missing_logits(device: torch.device) -> None:
    """Masked classes count nothing; of a row that has none left PyTorch's is −∞; NaN stays NaN."""
    y = torch.randn(4, 5000, device=device)
    y[0, 1:] = y[1] = -torch.inf
    y[2, 4999] = torch.nan
    got = head.normalizer(y, 5000)
    assert torch.allclose(got[0], y[0, 0])
    assert got[1] == -torch.inf
    assert got[2].isnan()
    assert torch.allclose(got[3], y[3].logsumexp(0))


@pytest.mark.parametrize("other", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize(("first", "columns"), [(0, 1001), (0, 64), (64, 937)])
@pytest.mark.parametrize("dtype", ERROR)
def test_gradients(first: int, columns: int, other: bool, dtype: torch.dtype, device: torch.device) -> None:
    """Of all classes, of the first, and of the last ones; an ignored row has none, also where it is not finite."""
    y = (3 * torch.randn(6, 1001, device=device)).to(dtype)
    y[4] = torch.inf
    labels = torch.tensor([0, 63, 64, 1000, 5, 70], device=device)
    factors = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0, 1e-4], device=device)
    g = torch.randn(6, 1001, device=device).to(dtype) if other else None
    normalizers = y.double().logsumexp(1)
    wide = padded(y), None if g is None else padded(g)
    got = head.gradient(y, normalizers.float(), labels, factors, g, first, columns)
    from_padded = head.gradient(wide[0], normalizers.float(), labels, factors, wide[1], first, columns)
    want = (y.double() - normalizers[:, None]).exp()
    want[torch.arange(6), labels] -= 1
    want = torch.where(factors[:, None] == 0, 0.0, want * factors[:, None].double())
    want = (want if g is None else want + g.double())[:, first : first + columns]
    assert got.dtype == dtype
    assert torch.equal(from_padded, got)
    assert torch.allclose(got.double(), want, rtol=ERROR[dtype], atol=1e-6)

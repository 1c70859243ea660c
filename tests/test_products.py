"""Integer products are exact: at the extremes, on int8 units and without, across the split against overflow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hotrain import products
from hotrain.products import code_matmul, int_matmul


@pytest.fixture(params=["as it is", "float32"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of computing the product: this machine's int8 units, where it has them, and float32."""
    if request.param == "float32":
        monkeypatch.setattr(products, "has_int8_units", lambda _: False)
    return request.param


def codes(m: int, k: int, n: int, low: int = -127, high: int = 127) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(m * 1000 + k * 10 + n)
    a = torch.randint(low, high + 1, (m, k), generator=draw).to(torch.int8)
    b = torch.randint(low, high + 1, (k, n), generator=draw).to(torch.int8)
    return a, b


def exact(a: Tensor, b: Tensor) -> Tensor:
    return a.to(torch.int64) @ b.to(torch.int64)


@pytest.mark.parametrize(
    ("m", "k", "n"),
    [
        (1, 1, 1),  # the smallest
        (3, 16, 5),  # one block of channels
        (17, 1040, 9),  # the longest sum that float32 carries in one piece: 1040·127² < 2²⁴
        (4, 1041, 4),  # one more
        (2, 5000, 3),  # several pieces, the last one short
        (33, 130, 31),  # nothing a multiple of 8
    ],
)
def test_random_codes(path: str, m: int, k: int, n: int) -> None:
    a, b = codes(m, k, n)
    got = int_matmul(a, b)
    assert got.dtype == torch.int32
    assert torch.equal(got.long(), exact(a, b))


@pytest.mark.parametrize("sign", [1, -1], ids=["+", "-"])
@pytest.mark.parametrize("k", [1040, 4096, 20_000])
def test_full_range_codes(path: str, sign: int, k: int) -> None:
    """Every partial sum as large as it can be: what a 16-bit intermediate (non-VNNI maddubs) would saturate."""
    a, b = torch.full((4, k), 127, dtype=torch.int8), torch.full((k, 4), sign * 127, dtype=torch.int8)
    assert torch.equal(int_matmul(a, b).long(), torch.full((4, 4), sign * k * 127**2))


def test_minus_128_with_its_own_limit(path: str) -> None:
    """Our formats never use −128; a caller whose codes do says so in `limit`."""
    a, b = torch.full((2, 3000), -128, dtype=torch.int8), torch.full((3000, 2), -128, dtype=torch.int8)
    assert torch.equal(int_matmul(a, b, limit=128 * 128).long(), exact(a, b))


def test_int4_codes(path: str) -> None:
    a, b = codes(5, 3000, 7, -7, 7)
    assert torch.equal(int_matmul(a, b, limit=49).long(), exact(a, b))


def test_a_sum_beyond_int32_is_split(path: str) -> None:
    """133,144 tokens of full-range codes overflow int32; the result is then int64 and exact."""
    k = (2**31 - 1) // 127**2 + 1
    a, b = torch.full((2, k), 127, dtype=torch.int8), torch.full((k, 2), 127, dtype=torch.int8)
    got = int_matmul(a, b)
    assert got.dtype == torch.int64
    assert torch.equal(got, torch.full((2, 2), k * 127**2))
    assert k * 127**2 > 2**31 - 1


def test_the_longest_sum_without_a_split_stays_int32(path: str) -> None:
    k = (2**31 - 1) // 127**2
    a, b = torch.full((1, k), 127, dtype=torch.int8), torch.full((k, 1), 127, dtype=torch.int8)
    got = int_matmul(a, b)
    assert got.dtype == torch.int32
    assert int(got) == k * 127**2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("number", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_codes(number: torch.dtype, dtype: torch.dtype) -> None:
    """Each product of two codes is exact (8 bits at most); K sums err by at most K·eps/2 of the sum of magnitudes."""
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=draw).mul(30).to(number) for shape in ((17, 1041), (1041, 9)))
    got = code_matmul(a, b, 16, dtype)
    assert got.dtype == dtype
    error = (got.double() - a.double() @ b.double()).abs()
    bound = 1041 * torch.finfo(dtype).eps / 2 * (a.double().abs() @ b.double().abs())
    assert (error <= bound).all()
    assert torch.equal(code_matmul(a[:, :1], b[:1], 16, dtype).double(), a[:, :1].double() @ b[:1].double())


def test_codes_that_are_integers_stay_exact(path: str) -> None:
    a, b = codes(5, 3000, 7)
    assert torch.equal(code_matmul(a, b, 16, torch.float32), int_matmul(a, b).float())


TRANSPOSES: list[tuple[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]] = [
    ("a transposed", lambda a, b: (a.T.contiguous().T, b)),  # as g_w calls it
    ("b transposed", lambda a, b: (a, b.T.contiguous().T)),
    ("both transposed", lambda a, b: (a.T.contiguous().T, b.T.contiguous().T)),
    ("a strided", lambda a, b: (a.repeat_interleave(2, 0)[::2], b)),
    ("b sliced", lambda a, b: (a, torch.cat((b, b), 1)[:, : b.shape[1]])),
]


# One output channel, one token, one input channel: their transposes have strides that `_int_mm` misreads on a CPU.
SIZES = [(24, 48, 40), (1, 48, 40), (24, 1, 40), (24, 48, 1), (1, 48, 1), (1, 1, 40), (24, 1, 1)]


@pytest.mark.parametrize("view", [v for _, v in TRANSPOSES], ids=[n for n, _ in TRANSPOSES])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_views(path: str, view: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], size: tuple[int, int, int]) -> None:
    a, b = codes(*size)
    assert torch.equal(int_matmul(*view(a, b)).long(), exact(a, b))


@pytest.mark.parametrize(("m", "k", "n"), [(0, 4, 3), (4, 0, 3), (4, 3, 0)])
def test_empty(path: str, m: int, k: int, n: int) -> None:
    a, b = codes(m, k, n)
    assert torch.equal(int_matmul(a, b), torch.zeros(m, n, dtype=torch.int32))


@settings(max_examples=40, deadline=None)
@given(m=st.integers(0, 40), k=st.integers(0, 200), n=st.integers(0, 40))
def test_any_shape(m: int, k: int, n: int) -> None:
    a, b = codes(m, k, n)
    assert torch.equal(int_matmul(a, b).long(), exact(a, b))

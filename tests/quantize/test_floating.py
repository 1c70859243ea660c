"""fp8 codes: their complete sets, scales that are powers of two, what does not depend on them, and the edges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import fp8, fp8_grid
from torch import Tensor

from hotrain.quantize.floating import DTYPES, largest_code, quantize, scale_of

NUMBERS = ["e4m3", "e5m2"]
INPUTS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
TINY = 2.0**-126
# Of codes: the smallest normal number, the step below it, and half a step of a normal number relative to it.
SMALLEST = {"e4m3": 2.0**-6, "e5m2": 2.0**-14}
STEP = {"e4m3": 2.0**-9, "e5m2": 2.0**-16}
RELATIVE = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}


def spread(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Values of both signs over 40 binades: codes from the largest to zero."""
    draw = torch.Generator().manual_seed(seed)
    t = torch.randn(rows, columns, dtype=torch.float64, generator=draw)
    return t * torch.exp2(torch.randint(-36, 4, (rows, columns), generator=draw))


def same(a: Tensor, b: Tensor) -> bool:
    """Equal float8 codes, bit by bit."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("power", [-100, -9, 0, 3, 90])
def test_every_number_of_the_format_is_its_own_code(number: str, power: int) -> None:
    """127 magnitudes of e4m3, 124 of e5m2, both signs: kept exactly under every power of two."""
    grid = torch.tensor(fp8_grid(number))
    assert len(grid) == {"e4m3": 127, "e5m2": 124}[number]
    assert float(grid[-1]) == largest_code(number) == {"e4m3": 448, "e5m2": 57344}[number]
    t = torch.stack((grid, -grid))
    got = quantize(t * 2.0**power, number)
    assert got.codes.dtype == DTYPES[number]
    assert float(got.scale) == 2.0**power
    assert torch.equal(got.codes.float(), t)
    assert torch.equal(got.dequantize(), t * 2.0**power)


@pytest.mark.parametrize("number", NUMBERS)
def test_halves_go_to_even(number: str) -> None:
    """Between every two neighbours: the one with an even last bit."""
    grid = torch.tensor(fp8_grid(number), dtype=torch.float64)
    even = torch.arange(len(grid) - 1) % 2 == 0
    between = (grid[:-1] + grid[1:]) / 2
    want = torch.where(even, grid[:-1], grid[1:])
    for sign in (1, -1):
        got = quantize(torch.cat((between, grid[-1:])).view(1, -1) * sign, number)
        assert float(got.scale) == 1
        assert torch.equal(got.codes.double()[0, :-1], want * sign)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("dtype", INPUTS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (17, 16), (16, 33)], ids=str)
def test_codes_are_the_definitions(number: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    for t in (spread(*shape).to(dtype), torch.randn(shape).to(dtype) * 1e-3):
        got = quantize(t, number)
        want, scale = fp8(t.double(), number)
        assert got.scale.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert got.scale.shape == ()
        assert float(got.scale) == float(scale)
        assert torch.equal(got.codes.double(), want)


@settings(max_examples=300, deadline=None)
@given(value=st.floats(allow_nan=False, allow_infinity=False, width=32), number=st.sampled_from(NUMBERS))
def test_the_scale_is_the_smallest_power_of_two(value: float, number: str) -> None:
    """It brings the value in range, half of it would not, and it does not fall below float32's smallest normal."""
    scale = float(scale_of(torch.tensor([[0.0, value]]), number))
    assert math.frexp(scale)[0] == 0.5
    assert abs(value) <= scale * largest_code(number)
    assert scale == TINY or abs(value) > scale / 2 * largest_code(number)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("power", [-1000, -126, -30, 0, 100, 900])
def test_the_scale_at_the_border_of_a_binade(number: str, power: int) -> None:
    """The largest code itself still fits its power of two, the next float64 needs twice that one."""
    edge = torch.tensor([largest_code(number)], dtype=torch.float64) * 2.0**power
    beyond = torch.nextafter(edge, edge * 2)
    assert float(scale_of(edge, number)) == max(2.0**power, TINY)
    assert float(scale_of(beyond, number)) == max(2.0 ** (power + 1), TINY)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("more", [1, 2, 3, 6])
def test_values_do_not_depend_on_the_scale(number: str, more: int) -> None:
    """What lets a kernel guess the scale: with one 2, 4, 8, 64 times as large all normal codes are worth the same, and
    the others are off by at most half a step below the smallest normal, of either scale."""
    t = spread(64, 64).float()
    own = quantize(t, number)
    larger = own.scale * 2.0**more
    got, want = quantize(t, number, larger).dequantize(), own.dequantize()
    normal = t.abs() >= SMALLEST[number] * larger
    assert normal.any()
    assert not normal.all()
    assert torch.equal(got[normal], want[normal])
    bound = STEP[number] / 2 * (larger + own.scale)
    assert ((got - want)[~normal].abs() <= bound).all()


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_the_error_is_relative_down_to_the_smallest_normal_number(number: str, dtype: torch.dtype) -> None:
    """Half a step: 2⁻⁴ (e4m3) or 2⁻³ (e5m2) of the value at most, and half the smallest step below the normal numbers.

    Exact bounds: scaling by a power of two rounds nothing, and float32 holds 16-bit inputs; 2⁻²³ more for float64.
    """
    t = spread(128, 64).to(dtype).double()
    got = quantize(t.to(dtype), number)
    error, scale = (got.dequantize().double() - t).abs(), got.scale.double()
    normal = t.abs() >= SMALLEST[number] * scale
    assert (error[normal] <= (RELATIVE[number] + 2.0**-23) * t.abs()[normal]).all()
    assert (error[~normal] <= (STEP[number] / 2 * (1 + 2.0**-23)) * scale).all()


# --- edges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_a_non_finite_entry_is_a_nan_and_touches_no_other(number: str, bad: float, dtype: torch.dtype) -> None:
    """The scale and the other codes are those without it: of the same matrix with a zero there."""
    t = torch.randn(5, 7).to(dtype)
    t[2, 3] = 0
    want = quantize(t, number)
    t[2, 3] = bad
    got = quantize(t, number)
    assert torch.equal(got.scale, want.scale)
    hit = torch.zeros(5, 7, dtype=torch.bool)
    hit[2, 3] = True
    assert torch.equal(got.codes.float().isnan(), hit)
    assert torch.equal(got.codes.float()[~hit], want.codes.float()[~hit])


@pytest.mark.parametrize("number", NUMBERS)
def test_nothing_finite(number: str) -> None:
    got = quantize(torch.full((2, 3), math.inf), number)
    assert float(got.scale) == TINY
    assert got.codes.float().isnan().all()


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_zeros_and_nothing(number: str, dtype: torch.dtype) -> None:
    for shape in ((4, 6), (0, 5), (5, 0), (0, 0)):
        got = quantize(torch.zeros(shape, dtype=dtype), number)
        assert float(got.scale) == TINY
        assert got.codes.shape == shape
        assert torch.equal(got.dequantize(dtype), torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("number", NUMBERS)
def test_denormals_never_divide_by_zero(number: str) -> None:
    """At the smallest scale a denormal is a fraction of 2⁻¹²⁶: within half a step of the smallest codes."""
    t = torch.tensor([[1e-41, -3e-39, 1e-45, 0.0]])
    got = quantize(t, number)
    assert float(got.scale) == TINY
    error = (got.codes.double() * TINY - t.double()).abs()
    assert (error <= torch.maximum(t.double().abs() * RELATIVE[number], torch.tensor(STEP[number] / 2 * TINY))).all()


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_the_largest_numbers_of_a_dtype(number: str, dtype: torch.dtype) -> None:
    """No overflow on the way to the codes. (Rounded up to a power of two, the value itself is beyond its dtype.)"""
    top = torch.finfo(dtype).max
    got = quantize(torch.tensor([[top, -top]], dtype=dtype), number)
    assert torch.isfinite(got.codes.float()).all()
    assert got.codes.float().tolist()[0] == pytest.approx([v / float(got.scale) for v in (top, -top)], RELATIVE[number])


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(("rows", "columns"), [(2, 1), (4001, 17), (500, 300)])
def test_large_tensors_are_cut_without_a_seam(number: str, rows: int, columns: int) -> None:
    t = torch.randn(rows, columns)
    assert same(quantize(t, number).codes, (t / scale_of(t, number)).to(DTYPES[number]))


@pytest.mark.parametrize("number", NUMBERS)
def test_views_and_the_input_left_as_it_was(number: str) -> None:
    for dtype in (torch.float32, torch.float64):
        t = torch.randn(48, 30, dtype=dtype)
        before = t.clone()
        for view in (t.T, t[::2], t[:, ::3]):
            assert same(quantize(view, number).codes, quantize(view.contiguous(), number).codes)
        assert torch.equal(t, before)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_value(number: str) -> None:
    """A byte an entry and one scale; any dtype comes out."""
    got = quantize(torch.randn(3, 5), number)
    assert got.codes.nbytes + got.scale.nbytes == 3 * 5 + 4
    assert got.dequantize(torch.bfloat16).dtype == torch.bfloat16


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 30),
    columns=st.integers(1, 40),
    number=st.sampled_from(NUMBERS),
    power=st.integers(-60, 60),
)
def test_any_shape_and_magnitude(rows: int, columns: int, number: str, power: int) -> None:
    """A power of two moves the scale and no code."""
    t = torch.randn(rows, columns)
    a, b = quantize(t, number), quantize(t * 2.0**power, number)
    assert same(a.codes, b.codes)
    assert float(b.scale) == float(a.scale) * 2.0**power

"""The forward product in codes against the float64 product of the oracle's codes, and against the exact one."""

from __future__ import annotations

import math

import pytest
import torch
from oracle import codes, sqnr_db
from torch import Tensor

from hotrain import forward

NUMBERS = ("fp8", "int8")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Unit roundoff of what holds the products' sums and scales, and of y.
UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

SHAPES = [
    # (tokens, input channels, output channels), and why
    ((1, 16, 24), "one token: a product that int8 units need padded"),
    ((7, 3, 5), "nothing that 8 or 16 divides"),
    ((197, 48, 100), "a ViT's tokens"),
    ((40, 100, 1), "one output channel"),
    ((33, 1, 17), "one input channel: every product is one of two codes"),
]


def problem(tokens: int, inputs: int, outputs: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    x, w, b = (
        torch.randn(*s, dtype=torch.float64, generator=draw) for s in ((tokens, inputs), (outputs, inputs), (outputs,))
    )
    return x.to(dtype), w.to(dtype), b.to(dtype)


def defined(x: Tensor, w: Tensor, b: Tensor | None, number: str, unit: float) -> tuple[Tensor, Tensor, Tensor]:
    """(y, the sum of the magnitudes that make it, what codes may move it), float64, from the oracle's codes.

    An int8 code may fall to the other side of a threshold where t/scale is within its own rounding of it: a division
    for the scale and one by it, up to 127 · 2 · unit. fp8's scale divides exactly.
    """
    kind = "e4m3" if number == "fp8" else "int"
    values, moves = [], []
    for t in (x.double(), w.double()):
        c, scale = codes(t, 8, "token", "nearest", number=kind)
        values.append(c * scale)
        near = ((t / scale) % 1 - 0.5).abs() < 254 * unit
        moves.append(near * scale if number == "int8" else torch.zeros_like(t))
    (left, right), (x_moves, w_moves) = values, moves
    offset = torch.zeros(len(w), dtype=torch.float64) if b is None else b.double()
    moved = x_moves @ (right.abs() + w_moves).T + left.abs() @ w_moves.T
    return left @ right.T + offset, left.abs() @ right.abs().T + offset.abs(), moved


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [shape for shape, _ in SHAPES], ids=[why for _, why in SHAPES])
def test_the_product_is_the_one_of_the_codes(shape: tuple[int, int, int], dtype: torch.dtype, number: str) -> None:
    """The codes are the oracle's, and products of two codes exact. What rounds: the sums (I + 1 terms), int8's
    two scales (a division each and its use) and y in its own dtype: (I + 6) unit roundoffs of the sum of the
    magnitudes, one of y. Of the codes next to a threshold `defined` says what they may do; most entries have none.
    """
    inner = UNIT[torch.float64 if dtype == torch.float64 else torch.float32]
    x, w, b = problem(*shape, dtype)
    for bias in (None, b):
        y = forward.product(x, w, bias, number)
        want, size, moved = defined(x, w, bias, number, inner)
        assert y.dtype == dtype
        assert y.shape == want.shape
        allowed = moved + (shape[1] + 6) * inner * size + UNIT[dtype] * (want.abs() + moved)
        assert bool(((y.double() - want).abs() <= allowed).all())
        assert float((moved > 0).double().mean()) < 0.5


@pytest.mark.parametrize(
    ("number", "floor"),
    [
        # Errors of 2.6 % of each operand, independent: 28.6 dB (docs/maths.md); half a dB for its spread.
        ("fp8", 28.1),
        # step²/12 with a step of max/127: at 3 deviations a row (256 entries reach it) 2·(3/127)²/12 is 40.3 dB.
        ("int8", 39.8),
    ],
)
def test_how_far_it_is_from_exact(number: str, floor: float) -> None:
    x, w, b = problem(512, 256, 128)
    assert sqnr_db(forward.product(x, w, b, number), x @ w.T + b) > floor


def test_int8_gives_every_token_and_every_output_channel_its_scale() -> None:
    """A token or channel a thousand times the others takes no bits from them: their y is the same, bit for bit."""
    x, w, _ = problem(33, 48, 24)
    y = forward.product(x, w, None, "int8")
    x[5] *= 1000
    w[7] *= 1000
    others = torch.arange(33) != 5, torch.arange(24) != 7
    again = forward.product(x, w, None, "int8")
    assert torch.equal(again[others[0]][:, others[1]], y[others[0]][:, others[1]])


@pytest.mark.parametrize("k", [-20, 3, 20])
def test_fp8_does_not_depend_on_the_scale(k: int) -> None:
    """A power of two goes through the codes untouched: y of 2ᵏ x is 2ᵏ y, bit for bit."""
    x, w, _ = problem(33, 48, 24)
    assert torch.equal(forward.product(x * 2.0**k, w, None, "fp8"), forward.product(x, w, None, "fp8") * 2.0**k)


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_that_codes_hold_are_multiplied_exactly(number: str) -> None:
    """Small integers, the largest of every row the code's own: y is the integer product, and so is its dtype's."""
    draw = torch.Generator().manual_seed(0)
    x, w = (torch.randint(-8, 9, size, generator=draw).float() for size in ((33, 48), (24, 48)))
    if number == "int8":  # scale = max/127 is 1
        x[:, 0] = w[:, 0] = 127
    y = forward.product(x, w, None, number)
    assert torch.equal(y, x @ w.T)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("shape", [(0, 16, 24), (5, 16, 0), (5, 0, 24)], ids=["no tokens", "no outputs", "no inputs"])
def test_empty(shape: tuple[int, int, int], number: str) -> None:
    x, w, b = problem(*shape)
    y = forward.product(x, w, b, number)
    assert y.shape == (shape[0], shape[2])
    assert torch.equal(y, b.expand(shape[0], shape[2]))


@pytest.mark.parametrize("number", NUMBERS)
def test_zeros_and_strides(number: str) -> None:
    """Zero codes of zeros, without a division by their scale; operands as a view gives them."""
    x, w, b = problem(33, 48, 24)
    assert torch.equal(forward.product(x * 0, w, b, number), b.expand(33, 24))
    wide = torch.stack((x, x), 1).flatten(0, 1)[::2]
    assert not wide.is_contiguous()
    assert torch.equal(forward.product(wide, w.T.contiguous().T, b, number), forward.product(x, w, b, number))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("number", NUMBERS)
def test_what_is_not_finite_reaches_its_token(number: str, bad: float) -> None:
    """A loss must see it; other tokens stay as they are: fp8's scale is of the finite entries, int8's of a token."""
    x, w, b = problem(33, 48, 24)
    want = forward.product(x, w, b, number)
    x[5, 3] = bad
    y = forward.product(x, w, b, number)
    rest = torch.arange(33) != 5
    assert not bool(y[5].isfinite().any())
    assert torch.equal(y[rest], want[rest])

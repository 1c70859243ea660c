"""Convolutions: every option against exact autograd, every preset against the definition by explicit index loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import conv_gradients, projection, sqnr_db
from torch import Tensor, nn

import hotrain
from hotrain import autograd, convolution, draws, functional
from hotrain.geometry import Geometry, patches, patches_transposed
from hotrain.layer import Config

# PyTorch's own remark on even kernels, once a process
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")

NAMES = hotrain.presets()
KEY = 0x9123456789ABCDEF
F64 = torch.float64
# r = 16 and nothing quantized: two ways to say it
OFF: dict[str, Any] = {"grad_input_bits": None, "grad_weight_bits": None, "saved_bits": None}
EXACT = [hotrain.preset("hla", rank=16), hotrain.preset("hot-unbiased", rank=16, **OFF)]

# (in, out, kernel, height, width, options): each with the reason that it is here
CASES: list[tuple[str, tuple[int, int, Any, int, int, dict[str, Any]]]] = [
    ("3x3", (4, 6, 3, 6, 7, {"padding": 1})),
    ("no padding", (4, 6, 3, 6, 7, {})),
    ("stride that does not divide", (4, 6, 3, 8, 7, {"stride": 2, "padding": 1})),
    ("stride beyond the kernel", (4, 6, 2, 9, 8, {"stride": 3})),
    ("unequal kernel, stride, padding", (4, 6, (3, 2), 7, 8, {"stride": (2, 1), "padding": (1, 0)})),
    ("dilation", (4, 6, 3, 9, 8, {"dilation": (2, 1), "padding": (2, 1)})),
    ("dilation and stride", (4, 6, 2, 9, 8, {"dilation": 3, "stride": 2})),
    ("same, odd kernel", (4, 6, 3, 6, 6, {"padding": "same"})),
    ("same, even kernel: one more at the end", (4, 6, (2, 4), 6, 7, {"padding": "same"})),
    ("same, dilation", (4, 6, 3, 6, 7, {"padding": "same", "dilation": 2})),
    ("valid", (4, 6, 3, 6, 6, {"padding": "valid"})),
    ("reflect", (4, 6, 3, 6, 7, {"padding": (1, 2), "padding_mode": "reflect"})),
    ("replicate", (4, 6, 3, 6, 7, {"padding": 2, "padding_mode": "replicate"})),
    ("circular", (4, 6, 3, 6, 7, {"padding": (2, 1), "padding_mode": "circular", "stride": 2})),
    ("reflect, same", (4, 6, 4, 7, 6, {"padding": "same", "padding_mode": "reflect"})),
    ("groups below 16 channels", (4, 6, 3, 6, 6, {"padding": 1, "groups": 2})),
    ("groups of 16 channels", (4, 32, 3, 5, 5, {"padding": 1, "groups": 2})),
    ("groups of 17 channels: padded blocks", (4, 34, 3, 5, 5, {"padding": 1, "groups": 2})),
    ("depthwise", (6, 6, 3, 6, 6, {"padding": 1, "groups": 6})),
    ("depthwise multiplier, stride", (4, 8, 3, 7, 6, {"stride": 2, "padding": 1, "groups": 4})),
    ("depthwise, circular", (4, 4, 3, 6, 6, {"padding": 1, "groups": 4, "padding_mode": "circular"})),
    ("1x1", (6, 20, 1, 5, 5, {})),
    ("1x1 strided", (6, 20, 1, 6, 5, {"stride": 2})),
    ("1x1 padded", (4, 6, 1, 4, 4, {"padding": 1})),
    ("1x1 groups", (4, 32, 1, 4, 4, {"groups": 2})),
    ("patchify", (3, 20, 4, 8, 12, {"stride": 4})),
    ("patchify, sizes it does not divide", (3, 20, (2, 3), 7, 8, {"stride": (2, 3)})),
    ("kernel as large as the image", (4, 6, 5, 5, 5, {})),
    ("one pixel", (4, 6, 3, 1, 1, {"padding": 1})),
]  # fmt: skip
E4M3 = hotrain.GradWeight(bits=8, number="e4m3", rounding="nearest")
# No transform: what is kept is x in codes, which are multiplied as they are, and small groups are rounded.
PLAIN = hotrain.Method(
    "plain",
    hotrain.GradInput(None, bits=8, number="e4m3", rounding="nearest"),
    E4M3,
    hotrain.Saved(bits=8, number="e4m3"),
)
FP8 = [hotrain.preset(name, number="e4m3") for name in ("hot", "hot-unbiased", "hq")]
FP8 += [hotrain.preset("hq", number="e5m2"), PLAIN]
IDS = [name for name, _ in CASES]
SHAPES = [case for _, case in CASES]
CASE = dict(CASES)


def pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def geometry_of(kernel: Any, options: dict[str, Any]) -> Geometry:
    padding = options.get("padding", 0)
    return Geometry(
        pair(kernel),
        pair(options.get("stride", 1)),
        padding if isinstance(padding, str) else pair(padding),
        pair(options.get("dilation", 1)),
        options.get("groups", 1),
        options.get("padding_mode", "zeros"),
    )


def problem(case: tuple, batch: int = 2, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor, Tensor]:
    inputs, outputs, kernel, height, width, options = case
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(batch, inputs, height, width, dtype=F64, generator=draw).to(dtype)
    w = torch.randn(outputs, inputs // options.get("groups", 1), *pair(kernel), dtype=F64, generator=draw).to(dtype)
    down, across = geometry_of(kernel, options).output_size(height, width)
    return x, w, torch.randn(batch, outputs, down, across, dtype=F64, generator=draw).to(dtype)


def module(case: tuple, w: Tensor) -> torch.nn.Conv2d:
    """PyTorch's own layer: the truth for every option."""
    inputs, outputs, kernel, _, _, options = case
    layer = torch.nn.Conv2d(inputs, outputs, kernel, bias=False, dtype=w.dtype, **options)
    layer.weight.data = w
    return layer


def gradients(x: Tensor, w: Tensor, g_y: Tensor, method: Any, options: dict, key: int = KEY) -> tuple[Tensor, Tensor]:
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    functional.conv2d(x, w, None, method=method, key=key, **options).backward(g_y)
    assert x.grad is not None
    assert w.grad is not None
    return x.grad, w.grad


@pytest.mark.parametrize("case", SHAPES, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64], ids=str)
def test_forward_is_pytorchs_to_the_bit(case: tuple, dtype: torch.dtype) -> None:
    x, w, g_y = problem(case, dtype=dtype)
    b = torch.randn(w.shape[0]).to(dtype)
    layer = module(case, w)
    layer.bias = torch.nn.Parameter(b)
    want = layer(x)
    for name in ("hot", "lbp-wht", "int4"):
        got = functional.conv2d(x, w.requires_grad_(), b, method=name, **case[5])
        assert torch.equal(got, want)
    assert want.shape == g_y.shape  # Geometry.output_size


@pytest.mark.parametrize("method", EXACT, ids=["hla", "hot-unbiased"])
@pytest.mark.parametrize("case", SHAPES, ids=IDS)
def test_full_rank_without_bits_equals_autograd(case: tuple, method: hotrain.Method) -> None:
    x, w, g_y = problem(case, batch=3)
    exact_x, layer = x.clone().requires_grad_(), module(case, w.clone())
    layer(exact_x).backward(g_y)
    g_x, g_w = gradients(x, w, g_y, method, case[5])
    torch.testing.assert_close(g_x, exact_x.grad, rtol=0, atol=1e-11)
    torch.testing.assert_close(g_w, layer.weight.grad, rtol=0, atol=1e-11)


def shrunk(case: tuple) -> tuple:
    """Few enough channels and pixels for finite differences."""
    inputs, outputs, kernel, height, width, options = case
    return (min(inputs, 4), 4 if outputs > 8 else outputs, kernel, min(height, 7), min(width, 7), options)


SMALL = [(name, shrunk(case)) for name, case in CASES if case[5].get("groups", 1) in (1, 2, 4)]


@pytest.mark.parametrize("case", [case for _, case in SMALL], ids=[name for name, _ in SMALL])
def test_gradcheck(case: tuple) -> None:
    """Both gradients and the bias's against finite differences, r = 16 and nothing quantized."""
    x, w, _ = problem(case, batch=1)
    options, b = case[5], torch.randn(case[1], dtype=F64)
    x, w, b = (t.requires_grad_() for t in (x, w, b))

    def run(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return functional.conv2d(x, w, b, method=EXACT[0], key=KEY, **options)

    assert torch.autograd.gradcheck(run, (x, w, b), fast_mode=True)


def test_gradcheck_entry_by_entry() -> None:
    """The slow mode, every entry of the Jacobian, on one small layer of each road."""
    strided: dict[str, Any] = {"padding": 1, "stride": 2}
    for case in (
        (2, 3, 3, 4, 5, strided),
        (2, 3, 2, 4, 4, {"stride": 2}),
        (2, 2, 3, 3, 3, {"padding": 1, "groups": 2}),
    ):
        x, w, _ = problem(case)
        options: dict[str, Any] = case[5]

        def run(x: Tensor, w: Tensor, options: dict[str, Any] = options) -> Tensor:
            return functional.conv2d(x, w, None, method=EXACT[1], key=KEY, **options)

        assert torch.autograd.gradcheck(run, (x.requires_grad_(), w.requires_grad_()))


METHODS = [hotrain.preset(name) for name in NAMES] + [
    hotrain.preset("hot", scale="tensor", rounding="stochastic"),
    hotrain.preset("hot-unbiased", saved_bits=4),
    hotrain.preset("hot-unbiased", saved_bits=None),
    hotrain.preset("hot-unbiased", grad_weight_bits=None),
    hotrain.preset("hq", grad_weight_bits=4, rounding="pseudo"),
    *FP8,
]


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("case", SHAPES, ids=IDS)
def test_both_gradients_are_the_definition(case: tuple, method: hotrain.Method) -> None:
    """In float64, codes recomputed from the same noise; `slack` is 0 but for ties (see the oracle)."""
    x, w, g_y = problem(case)
    geometry, config = geometry_of(case[2], case[5]), Config(method)
    p_in = projection(config.layout((2, *x.shape[2:])), KEY)
    p_out = projection(config.layout((2, *g_y.shape[2:])), KEY)
    want_x, want_w, _, slack = conv_gradients(x, w, g_y, geometry, method, KEY, p_in, p_out)
    g_x, g_w = gradients(x, w, g_y, method, case[5])
    torch.testing.assert_close(g_x, want_x, rtol=0, atol=1e-11)
    torch.testing.assert_close(g_w, want_w, rtol=0, atol=1e-11 + slack)


# Outputs of 8 lines or more, of which some are drawn.
TALL = [
    ("3x3", (4, 6, 3, 9, 5, {"padding": 1})),
    ("stride that does not divide", (4, 6, 3, 18, 5, {"stride": (2, 1), "padding": 1})),
    ("unequal kernel, dilation and padding", (4, 6, (3, 2), 12, 6, {"dilation": (2, 1), "padding": (1, 0)})),
    ("same, even kernel", (4, 6, (2, 4), 8, 7, {"padding": "same"})),
    ("circular", (4, 6, 3, 10, 7, {"padding": (2, 1), "padding_mode": "circular"})),
    ("groups of 16 channels", (4, 32, 3, 8, 4, {"padding": 1, "groups": 2})),
    ("depthwise: all", (6, 6, 3, 9, 6, {"padding": 1, "groups": 6})),
    ("7 lines: all", (4, 6, 3, 7, 9, {"padding": 1})),
]  # fmt: skip
LINES = [
    hotrain.preset("hot-importance"),
    hotrain.preset("hot-importance", number="e4m3"),
    hotrain.preset("hla", rank=16, share=0.3),  # without codes
    hotrain.preset("hot-unbiased", share=0.5),  # of an input that is restored from drawn rows
]


@pytest.mark.parametrize("method", LINES, ids=str)
@pytest.mark.parametrize("case", [case for _, case in TALL], ids=[name for name, _ in TALL])
def test_drawn_lines_are_the_definition(case: tuple, method: hotrain.Method) -> None:
    test_both_gradients_are_the_definition(case, method)


def test_1x1_and_linear_are_one() -> None:
    """A 1×1 convolution is the Linear layer on its pixels, to the bit, for every preset."""
    x, w, g_y = problem((6, 20, 1, 5, 5, {}))
    for name in NAMES:
        g_x, g_w = gradients(x, w, g_y, name, {})
        tokens, weight = x.permute(0, 2, 3, 1).contiguous().requires_grad_(), w.flatten(1).clone().requires_grad_()
        functional.linear(tokens, weight, method=name, key=KEY).backward(g_y.permute(0, 2, 3, 1))
        assert tokens.grad is not None
        assert weight.grad is not None
        assert torch.equal(g_x, tokens.grad.permute(0, 3, 1, 2)), name
        assert torch.equal(g_w.flatten(1), weight.grad), name


@pytest.mark.parametrize("name", ["hot", "hot-unbiased", "hq4", "hot-importance"])
def test_depthwise_rounds_no_g_y(name: str) -> None:
    """No block of 16 channels to rotate: g_x is exact, only the kept x is compressed."""
    case = (8, 8, 3, 6, 6, {"padding": 1, "groups": 8})
    x, w, g_y = problem(case)
    exact = module(case, w.clone())
    exact_x = x.clone().requires_grad_()
    exact(exact_x).backward(g_y)
    g_x, g_w = gradients(x, w, g_y, name, case[5])
    torch.testing.assert_close(g_x, exact_x.grad, rtol=0, atol=1e-12)
    assert exact.weight.grad is not None
    assert not torch.allclose(g_w, exact.weight.grad, rtol=1e-3)


def test_codes_of_eight_bits_are_exact_in_bf16() -> None:
    """Each of them: that is what a GPU multiplies."""
    integers = torch.arange(-127, 128)
    assert torch.equal(integers.to(torch.bfloat16).double(), integers.double())
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        codes = torch.arange(256).to(torch.uint8).view(dtype).double()
        codes = codes[codes.isfinite()]
        assert torch.equal(codes.to(torch.bfloat16).double(), codes)


@pytest.mark.parametrize("name", ["hot", "hot-unbiased", "hq8", *FP8], ids=str)
@pytest.mark.parametrize("kind", ["3x3", "circular", "groups of 16 channels"])
def test_products_in_bf16_are_those_of_codes(
    kind: str, name: str | hotrain.Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: a rounding of each operand that has scales of its own, and one of the result, 2⁻⁹ at most each."""
    case = CASE[kind]
    x, w, g_y = problem(case, dtype=torch.bfloat16)
    want = gradients(x, w, g_y, name, case[5])
    monkeypatch.setattr(convolution, "of_products", lambda g_y: torch.bfloat16)
    for got, wanted in zip(gradients(x, w, g_y, name, case[5]), want, strict=True):
        difference = (got.double() - wanted.double()).norm()
        assert difference <= 4 * 2**-9 * wanted.double().norm()


# --- bias and noise --------------------------------------------------------------------------------------------------


def test_3x3_drawn_rows_and_drawn_lines_are_unbiased() -> None:
    """z of every entry of both gradients over 300 keys (72 and 128 entries, 5σ); HOT fails the same bound."""
    case = (2, 4, 3, 8, 4, {"padding": 1})  # lines are drawn from 8 on
    x, w, g_y = problem(case)
    exact_x, layer = x.clone().requires_grad_(), module(case, w.clone())
    truth = torch.autograd.grad(layer(exact_x), (exact_x, layer.weight), g_y)

    def z(name: str, which: int, keys: int) -> float:
        draws = torch.stack([gradients(x, w, g_y, name, case[5], key)[which] for key in range(keys)])
        spread = draws.std(0) / math.sqrt(keys)
        return float(((draws.mean(0) - truth[which]) / spread).abs().max())

    for name in ("hot-unbiased", "hot-importance"):
        assert z(name, 0, 300) < 5
        assert z(name, 1, 300) < 5
    assert z("hot", 1, 60) > 10


@pytest.mark.parametrize("name", ["hq", "hq4", "int4", "luq"])
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_signal_to_noise_floors(name: str, dtype: torch.dtype) -> None:
    """A 3×3 layer of 32 channels on white data, full rank, worst case of its bits.

    int4: a step is max/7 ≈ 4.2σ/7, its noise at most step²/6 = 0.06 an operand, 0.124 a product of two: 9 dB; LUQ's
    log steps 0.08. Over 8 dB. int8: steps 18 times smaller, 25 dB less noise; x is rounded twice in hq: over 30 dB.
    """
    case = (32, 32, 3, 8, 8, {"padding": 1})
    x, w, g_y = problem(case, dtype=dtype)
    g_x, g_w = gradients(x, w, g_y, name, case[5])
    exact_x, layer = x.double().requires_grad_(), module(case, w.double())
    layer(exact_x).backward(g_y.double())
    assert exact_x.grad is not None
    assert layer.weight.grad is not None
    assert sqnr_db(g_x, exact_x.grad) > 8
    assert sqnr_db(g_w, layer.weight.grad) > (30 if name == "hq" else 8)


# --- edges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NAMES, *FP8], ids=str)
@pytest.mark.parametrize("case", SHAPES, ids=IDS)
def test_an_empty_batch_works(case: tuple, name: str | hotrain.Method) -> None:
    x, w, g_y = problem(case, batch=0)
    g_x, g_w = gradients(x, w, g_y, name, case[5])
    assert g_x.shape == x.shape
    assert torch.equal(g_w, torch.zeros_like(w))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", [*NAMES, *FP8], ids=str)
@pytest.mark.parametrize(
    "kind", ["3x3", "stride that does not divide", "groups below 16 channels", "depthwise", "1x1 strided", "patchify"]
)
def test_a_non_finite_g_y_reaches_both_gradients(kind: str, name: str | hotrain.Method, bad: float) -> None:
    """Wherever exact autograd has a non-finite entry, ours has one; a product with padding may be left out."""
    case = CASE[kind]
    x, w, g_y = problem(case, dtype=torch.float32)
    one = torch.zeros_like(g_y)
    one[1, 1, -1, -1] = 1
    counted = module(case, w.clone())
    counted(torch.ones_like(x)).backward(one)
    g_y[1, 1, -1, -1] = bad
    exact_x, layer = x.clone().requires_grad_(), module(case, w.clone())
    layer(exact_x).backward(g_y)
    g_x, g_w = gradients(x, w, g_y, name, case[5])
    assert exact_x.grad is not None
    assert layer.weight.grad is not None
    assert not torch.isfinite(g_x[~torch.isfinite(exact_x.grad)]).any()
    assert counted.weight.grad is not None
    assert not torch.isfinite(g_w[~torch.isfinite(layer.weight.grad) & (counted.weight.grad != 0)]).any()
    assert not torch.isfinite(g_w).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["3x3", "groups below 16 channels", "1x1", "patchify"])
def test_channels_last_and_strided_tensors_give_the_same(kind: str, name: str) -> None:
    """Memory format of x and of g_y (and a g_y that is an expanded scalar, as `.sum()` makes it)."""
    case = CASE[kind]
    x, w, g_y = problem(case)
    want = gradients(x, w, g_y, name, case[5])
    last = torch.channels_last
    got = gradients(x.to(memory_format=last), w.to(memory_format=last), g_y.to(memory_format=last), name, case[5])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)
    ones = torch.ones((), dtype=F64).expand_as(g_y)
    for a, b in zip(gradients(x, w, ones, name, case[5]), gradients(x, w, ones.clone(), name, case[5]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", NAMES)
def test_an_image_without_a_batch_axis(name: str) -> None:
    case = CASE["3x3"]
    x, w, g_y = problem(case, batch=1)
    g_x, g_w = gradients(x, w, g_y, name, case[5])
    single = gradients(x[0], w, g_y[0], name, case[5])
    assert torch.equal(single[0], g_x[0])
    assert torch.equal(single[1], g_w)


def test_the_bias_gradient_is_exact() -> None:
    x, w, g_y = problem(CASE["3x3"])
    b = torch.zeros(w.shape[0], dtype=F64, requires_grad=True)
    for name in NAMES:
        b.grad = None
        functional.conv2d(x, w, b, method=name, padding=1).backward(g_y)
        assert b.grad is not None
        torch.testing.assert_close(b.grad, g_y.sum((0, 2, 3)), rtol=0, atol=1e-12)


# --- the pieces ------------------------------------------------------------------------------------------------------


@st.composite
def geometries(draw: st.DrawFn) -> tuple[Geometry, int, int]:
    kernel = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    dilation = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    stride = draw(st.one_of(st.tuples(st.integers(1, 4), st.integers(1, 4)), st.just(kernel)))
    padding = draw(st.one_of(st.tuples(st.integers(0, 3), st.integers(0, 3)), st.sampled_from(["same", "valid"])))
    if padding == "same":
        stride = (1, 1)
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    height, width = draw(st.integers(1, 10)), draw(st.integers(1, 10))
    geometry = Geometry(kernel, stride, padding, dilation, 1, mode)
    left, right, top, bottom = geometry.pads
    assume(min(geometry.output_size(height, width)) > 0)
    room = 1 if mode == "reflect" else 0
    assume(mode in ("zeros", "replicate") or (max(top, bottom) <= height - room and max(left, right) <= width - room))
    return geometry, height, width


@settings(max_examples=120, deadline=None)
@given(geometries(), st.integers(1, 2), st.integers(1, 3))
def test_any_geometry(case: tuple[Geometry, int, int], batch: int, channels: int) -> None:
    """Output size, padding and its transpose, and both gradients of whatever Conv2d accepts."""
    geometry, height, width = case
    x = torch.randn(batch, channels, height, width, dtype=F64, requires_grad=True)
    w = torch.randn(2, channels, *geometry.kernel, dtype=F64, requires_grad=True)
    y = geometry.forward(x, w, None)
    assert tuple(y.shape[2:]) == geometry.output_size(height, width)
    padded = geometry.pad(x)
    assert tuple(padded.shape) == geometry.padded((batch, channels, height, width))
    g = torch.randn_like(padded)
    (want,) = torch.autograd.grad(padded, x, g) if padded is not x else (g,)
    torch.testing.assert_close(geometry.pad_transposed(g, height, width), want, rtol=0, atol=1e-12)
    g_y = torch.randn_like(y)
    want_x, want_w = torch.autograd.grad(y, (x, w), g_y)
    call = autograd.call_of(Config(EXACT[0], geometry=geometry), x)
    got_x, got_w = torch.autograd.grad(autograd.apply(x, w, None, call, draws.signed(KEY)), (x, w), g_y)
    torch.testing.assert_close(got_x, want_x, rtol=0, atol=1e-10)
    torch.testing.assert_close(got_w, want_w, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["1x1", "1x1 strided", "patchify", "patchify, sizes it does not divide"])
def test_patches_and_their_transpose(kind: str) -> None:
    """⟨patches x, z⟩ = ⟨x, patchesᵀ z⟩, and the patches of a convolution that is one."""
    case = CASE[kind]
    x, w, _ = problem(case)
    geometry = geometry_of(case[2], case[5])
    assert geometry.is_patches
    tokens = patches(x, geometry)
    z = torch.randn_like(tokens)
    back = patches_transposed(z, (x.shape[0], x.shape[1], x.shape[2], x.shape[3]), geometry)
    torch.testing.assert_close((tokens * z).sum(), (x * back).sum())
    y = module(case, w)(x).permute(0, 2, 3, 1)
    torch.testing.assert_close(tokens @ w.flatten(1).T, y)


@pytest.mark.parametrize("kind", ["3x3", "stride beyond the kernel", "1x1 padded", "1x1 groups"])
def test_what_is_not_patches(kind: str) -> None:
    """Overlap, gaps, padding and groups are no Linear layer on patches; a gap of 1×1 strides is."""
    assert not geometry_of(CASE[kind][2], CASE[kind][5]).is_patches


@pytest.mark.parametrize("method", ["hq8", "hot"])
def test_gradients_of_channels_last_weights_have_their_strides(method: str) -> None:
    """In axes of one entry too, which say nothing, but which DDP and foreach optimizers compare."""
    layers = [nn.Conv2d(32, 32, 1), nn.Conv2d(32, 32, 3, groups=32), nn.Conv2d(32, 32, 3), nn.Conv2d(32, 32, 2, 2)]
    net = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    hotrain.convert(net, method)
    net(torch.randn(2, 32, 12, 12).to(memory_format=torch.channels_last)).square().sum().backward()
    for layer in layers:
        assert layer.weight.grad is not None
        assert layer.weight.grad.stride() == layer.weight.stride()

"""The two gradients of a matrix product against their dense float64 definition; their bias, noise and edges."""

from __future__ import annotations

import math

import pytest
import torch
from oracle import codes, dropped, grad_input, grad_weight, keep, luq, projection, rotated, sawb, sqnr_db
from torch import Tensor

import hotrain
from hotrain import backward, functional, published
from hotrain.layer import Config
from hotrain.transform.tokens import Grid, layout

NAMES = hotrain.presets()
FP8 = [hotrain.preset(name, number="e4m3") for name in ("hot", "hot-unbiased", "hq")]
FP8.append(hotrain.preset("hq", number="e5m2"))
EVERY = [*(hotrain.preset(name) for name in NAMES), *FP8]
KEY = 0x9123456789ABCDEF
F64 = torch.float64


def gradients(
    x: Tensor, w: Tensor, g_y: Tensor, method: hotrain.Method | str, key: int = KEY, grid: Grid | None = None
) -> tuple[Tensor, Tensor]:
    """(g_x, g_w) as a training step makes them."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    functional.linear(x, w, method=method, key=key, grid=grid).backward(g_y)
    assert x.grad is not None
    assert w.grad is not None
    return x.grad, w.grad


def defined(
    x: Tensor, w: Tensor, g_y: Tensor, method: hotrain.Method, key: int = KEY, grid: Grid | None = None
) -> tuple[Tensor, Tensor]:
    """The same from the oracle, as tokens × channels."""
    lead = tuple(x.shape[:-1])
    p = projection(Config(method, grid).layout(lead), key)
    tokens, g = x.reshape(-1, x.shape[-1]), g_y.reshape(-1, g_y.shape[-1])
    kept = keep(tokens, p, method, key)
    return grad_input(g, w, method, key, p), grad_weight(g, kept, p, method, key)


def problem(
    lead: tuple[int, ...], channels: int = 20, outputs: int = 24, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(*lead, channels, dtype=F64, generator=draw)
    w = torch.randn(outputs, channels, dtype=F64, generator=draw)
    return x, w, torch.randn(*lead, outputs, dtype=F64, generator=draw)


# --- every path against its definition -------------------------------------------------------------------------------

SHAPES = [
    ((2, 197), Grid(14, 14, 1)),  # a ViT: squares, lines, class token, remainder
    ((2, 198), Grid(14, 14, 2, dense_prefix=False)),  # DeiT, prefix in the tiles
    ((2, 7, 7), None),  # Swin's last stage
    ((3, 50), None),  # a line with a remainder
    ((19, 5), None),  # short samples, flattened
    ((), None),  # a vector
]
METHODS = [hotrain.preset(name) for name in NAMES] + [
    hotrain.preset("hot", scale="tensor"),
    hotrain.preset("hot", rounding="nearest"),
    hotrain.preset("hot", rounding="pseudo"),
    hotrain.preset("hot", order="sequency", rank=5),
    hotrain.preset("hot", order="lp_l1", saved_bits=None),
    hotrain.preset("hot", grad_weight_bits=None),
    hotrain.preset("hot", grad_input_bits=8, grad_weight_bits=4),
    hotrain.preset("hot-unbiased", saved_bits=4),
    hotrain.preset("hot-unbiased", rank=6, sampled=2),
    hotrain.preset("hot-unbiased", sampled=8),
    hotrain.preset("hla", sampled=4),
    hotrain.preset("hq4", saved_bits=8),  # int8 with a per-row scale
    hotrain.preset("hq", grad_input_bits=None, grad_weight_bits=None, saved_bits=4),
    hotrain.preset("lbp-wht", rank=36),
    hotrain.preset("int4", rounding="stochastic", scale="token"),
    *FP8,
    hotrain.Method(  # x kept as it is, fp8 codes of it made in backward; no rotation
        "late",
        hotrain.GradInput(None, bits=8, number="e5m2", rounding="nearest"),
        hotrain.GradWeight(bits=8, number="e5m2", rounding="nearest"),
    ),
    # The rotated form of g_x, which no preset has in fp8.
    hotrain.Method("rotated", hotrain.GradInput("hadamard", bits=8, number="e4m3", rounding="nearest")),
    hotrain.Method("kept", saved=hotrain.Saved(8, "e4m3")),  # fp8 is what is kept; the products are not
]


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize(("lead", "grid"), SHAPES, ids=lambda v: str(v))
def test_both_gradients_are_the_definition(method: hotrain.Method, lead: tuple[int, ...], grid: Grid | None) -> None:
    """In float64, with codes recomputed from the same noise: what differs is the order of sums (1e−11)."""
    x, w, g_y = problem(lead)
    g_x, g_w = gradients(x, w, g_y, method, grid=grid)
    want_x, want_w = defined(x, w, g_y, method, grid=grid)
    torch.testing.assert_close(g_x.reshape(want_x.shape), want_x, rtol=0, atol=1e-11)
    torch.testing.assert_close(g_w, want_w, rtol=0, atol=1e-11)


@pytest.mark.parametrize("outputs", [16, 10, 1, 100])
def test_output_channels_that_16_does_not_divide(outputs: int) -> None:
    """H pads O with zeros; g_x without bits is exact to rounding, with bits it is the definition."""
    x, w, g_y = problem((40,), outputs=outputs)
    for method in (hotrain.preset("hot"), hotrain.preset("hot-unbiased"), *FP8):
        want_x, want_w = defined(x, w, g_y, method)
        g_x, g_w = gradients(x, w, g_y, method)
        torch.testing.assert_close(g_x, want_x, rtol=0, atol=1e-11)
        torch.testing.assert_close(g_w, want_w, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["hot", "hot-unbiased", "int4"])
def test_the_codes_of_the_g_x_path(name: str) -> None:
    path = hotrain.preset(name).grad_input
    _, w, g_y = problem((50,), outputs=24)
    on = path.transform == "hadamard"
    axis = "token" if path.scale == "auto" else path.scale
    grad, weight = backward.rotated_grad(g_y, path, KEY), backward.rotated_weight(w, path, KEY)
    want, scale = codes(rotated(g_y, 1, on), 4, axis, path.rounding, KEY, 2)
    assert torch.equal(grad.codes.double(), want)
    torch.testing.assert_close(grad.scale, scale, rtol=1e-14, atol=0)
    want, scale = codes(rotated(w, 0, on), 4, path.weight_scale, path.weight_rounding, KEY, 4)
    assert torch.equal(weight.codes.double(), want)
    torch.testing.assert_close(weight.scale, scale, rtol=1e-14, atol=0)


def test_float32_equals_the_definition_to_float32() -> None:
    """The dtype of training. A code falls to the other side of a rounding threshold where t/scale is within float32's
    error of it, and the result moves by a step: with some thousand codes at 2⁻²⁴ that is rare; none here."""
    x, w, g_y = problem((2, 49))
    for method in EVERY:
        g_x, g_w = gradients(x.float(), w.float(), g_y.float(), method)
        want_x, want_w = defined(x.float().double(), w.float().double(), g_y.float().double(), method)
        assert sqnr_db(g_x.view(want_x.shape), want_x) > 80, method
        assert sqnr_db(g_w, want_w) > 80, method


# --- the low-rank step alone -----------------------------------------------------------------------------------------

ORDERS = ["lp_l1", "sequency", "auto"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("lead", "grid"),
    [
        ((2, 197), Grid(14, 14, 1)),  # with a class token
        ((2, 196), Grid(14, 14)),  # without
        ((2, 201), Grid(14, 14, 5)),  # class and register tokens
        ((2, 49), Grid(7, 7)),
        ((2, 8, 8), None),  # 4-D Swin layout
        ((2, 64), None),
    ],
    ids=["14x14+cls", "14x14", "14x14+cls+4reg", "7x7", "swin", "line"],
)
def test_hla_is_the_explicit_projection_for_every_rank(lead: tuple[int, ...], grid: Grid | None, order: str) -> None:
    """g_w = g_yᵀ PᵀP x with P dense; PᵀP is a projection of the rank it says; g_x is exact."""
    x, w, g_y = problem(lead, 6, 5)
    flat_x, flat_g = x.reshape(-1, 6), g_y.reshape(-1, 5)
    last = math.inf
    for rank in range(1, 17):
        method = hotrain.preset("hla", rank=rank, order=order)
        lay = Config(method, grid).layout(lead)
        p = projection(lay, KEY)
        if -1 not in lay.slots:  # a tile filled up with zeros shortens its rows
            torch.testing.assert_close(p @ p.T, torch.eye(lay.rows, dtype=F64), rtol=0, atol=1e-14)
        assert float(torch.linalg.matrix_norm(p, 2)) < 1 + 1e-12
        g_x, g_w = gradients(x, w, g_y, method, grid=grid)
        torch.testing.assert_close(g_w, flat_g.T @ (p.T @ (p @ flat_x)), rtol=0, atol=1e-12)
        torch.testing.assert_close(g_x, g_y @ w, rtol=0, atol=1e-13)
        lost = float((flat_x - p.T @ (p @ flat_x)).norm())
        if grid is None:  # where the layout does not change with the rank, more rows lose less
            assert lost <= last + 1e-12
            last = lost
    torch.testing.assert_close(g_w, flat_g.T @ flat_x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("tokens", [1, 7, 49, 197, 577])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_full_rank_without_bits_is_exact_at_every_length(tokens: int, batch: int, order: str) -> None:
    """n = 16 fixed: padding, dense remainders and flattening lose nothing."""
    x, w, g_y = problem((batch, tokens), 6, 5)
    side = math.isqrt(tokens)
    for grid in (None, Grid(side, side, tokens - side * side)):
        for name in ("hla", "hot-unbiased"):
            off = {} if name == "hla" else {"grad_input_bits": None, "grad_weight_bits": None, "saved_bits": None}
            method = hotrain.preset(name, rank=16, order=order, **off)
            g_x, g_w = gradients(x, w, g_y, method, grid=grid)
            torch.testing.assert_close(g_x, g_y @ w, rtol=0, atol=1e-12)
            torch.testing.assert_close(g_w, g_y.reshape(-1, 5).T @ x.reshape(-1, 6), rtol=0, atol=1e-11)


def test_low_rank_is_not_a_silent_no_op_at_197_tokens() -> None:
    """The published code's defect T3: at 197 tokens its low-rank step is the identity."""
    x, w, g_y = problem((2, 197))
    exact = g_y.reshape(-1, 24).T @ x.reshape(-1, 20)
    for rank in (1, 4, 8, 15):
        g_w = gradients(x, w, g_y, hotrain.preset("hla", rank=rank))[1]
        lost = float((g_w - exact).square().sum() / exact.square().sum())
        # white data: 1 − r/16 of the energy, known to √(2/(24·20)) of itself; tokens of the remainder are not lost
        assert abs(lost - (1 - rank / 16)) < 0.08 + 5 * math.sqrt(2 / 480) * (1 - rank / 16)


# --- bias ------------------------------------------------------------------------------------------------------------


def z_scores(draws: list[Tensor], truth: Tensor) -> Tensor:
    """(mean − truth)/(deviation of the mean), entry by entry."""
    stack = torch.stack(draws)
    return (stack.mean(0) - truth) / (stack.std(0) / math.sqrt(len(draws)))


UNBIASED = [
    # (method, grid, g_x is claimed too)
    (hotrain.preset("hot-unbiased"), None, True),
    (hotrain.preset("hot-unbiased"), Grid(5, 7, 2), True),  # squares and lines and dense tokens
    (hotrain.preset("hot-unbiased", rank=6, sampled=2), None, True),
    (hotrain.preset("hot-unbiased", sampled=8), None, True),
    (hotrain.preset("hot-unbiased", rank=1), None, True),
    (hotrain.preset("hot-unbiased", saved_bits=4), None, True),
    (hotrain.preset("hla", sampled=4), None, False),
    (hotrain.preset("hot-importance"), None, True),
    (hotrain.preset("hla", rank=16, share=0.25), None, False),  # without any rounding
    (hotrain.preset("hot-unbiased", share=0.5), None, True),  # of drawn rows, in int8 with one scale
    (hotrain.preset("hq4"), None, False),  # a per-row scale folded into g_y; its w is rounded to nearest
]


@pytest.mark.parametrize(("method", "grid", "both"), UNBIASED, ids=[f"{m}-{g}" for m, g, _ in UNBIASED])
def test_unbiased(method: hotrain.Method, grid: Grid | None, both: bool) -> None:
    """E[g_w] and E[g_x] are exact: z of every entry over 400 keys.

    With 400 draws z is normal to the accuracy needed; P(|z| > 5) = 6e−7 an entry, 128 entries each. The mean of z²
    must be near 1 as well: entries of one row share draws, so within 5·√(2/16), the rows alone counted.
    """
    x, w, g_y = problem((37,), 8, 16, seed=3)
    both_draws = [gradients(x, w, g_y, method, key, grid) for key in range(400)]
    z_w = z_scores([g_w for _, g_w in both_draws], g_y.T @ x)
    assert float(z_w.abs().max()) < 5
    assert float(z_w.square().mean()) < 1 + 5 * math.sqrt(2 / 16)
    if both:
        z_x = z_scores([g_x for g_x, _ in both_draws], g_y @ w)
        assert float(z_x.abs().max()) < 5


def test_the_same_test_convicts_the_fixed_rows_and_the_rounded_weight() -> None:
    """Its power: HOT as published is biased on both paths, far beyond the bound."""
    x, w, g_y = problem((37,), 8, 16, seed=3)
    draws = [gradients(x, w, g_y, hotrain.preset("hot"), key) for key in range(100)]
    assert float(z_scores([g_w for _, g_w in draws], g_y.T @ x).abs().max()) > 50
    assert float(z_scores([g_x for g_x, _ in draws], g_y @ w).abs().max()) > 10


def test_fp8_keeps_the_unbiasedness_of_the_rows_alone() -> None:
    """What docs/maths.md says of hot-unbiased in fp8: its mean is exact but for the rounding, which is deterministic.

    g_w over 400 keys: white data lose 1.5 of their energy as noise in one step (LOW_RANK below), 1.5/400 in the mean;
    each rounded operand adds at most (2⁻⁴)² of its energy. g_x does not depend on the key at all. Fixed rows instead
    lose half of the energy in every step.
    """
    x, w, g_y = problem((64,), 8, 16, seed=3)
    exact = g_y.T @ x

    def mean(name: str) -> Tensor:
        drawn = [gradients(x, w, g_y, hotrain.preset(name, number="e4m3"), key) for key in range(400)]
        assert all(torch.equal(g_x, drawn[0][0]) for g_x, _ in drawn)
        return torch.stack([g_w for _, g_w in drawn]).mean(0)

    # 128 entries, 16 rows of draws: the mean's energy is known to within a factor of 1 + 5·√(2/16)
    noise = 1.5 / 400 * (1 + 5 * math.sqrt(2 / 16)) + 2 * 2.0**-8 * (1 + 1.5)
    assert sqnr_db(mean("hot-unbiased"), exact) > -10 * math.log10(noise)
    assert sqnr_db(mean("hot"), exact) < 6


def test_dropout_is_biased_by_its_share_alone() -> None:
    """Half of the entries are missing and not made up for: E[g_w] = ½ exact."""
    x, w, g_y = problem((37,), 8, 16, seed=3)
    draws = [gradients(x, w, g_y, "dropout", key)[1] for key in range(400)]
    assert float(z_scores(draws, g_y.T @ x / 2).abs().max()) < 5


def smooth(tokens: int, channels: int, rho: float, seed: int) -> Tensor:
    """Tokens that resemble their neighbours: a first-order autoregression of that correlation, variance 1."""
    e = torch.randn(tokens, channels, dtype=F64, generator=torch.Generator().manual_seed(seed))
    for t in range(1, tokens):
        e[t] = rho * e[t - 1] + math.sqrt(1 - rho * rho) * e[t]
    return e


def test_variance_of_drawn_rows_on_smooth_tokens() -> None:
    """On tokens of correlation 0.9 (1,024 of them, r = 8, relative to ‖g_w‖):

    fixed 8+0: no noise, but a bias that no averaging removes. 4+4: unbiased; its deviation in one step is of the size
    of that bias, and is below half of it after 16 steps. 0+8: unbiased too, at more than 50 times the variance of
    4+4: where the energy is low, the low rows must not be left to chance.
    """
    x = smooth(1024, 16, 0.9, 0)
    g_y = 0.3 * x @ torch.randn(16, 16, dtype=F64, generator=torch.Generator().manual_seed(5)) / 4 + smooth(
        1024, 16, 0.9, 1
    )
    w, exact = torch.zeros(16, 16, dtype=F64), g_y.T @ x

    def of(rank_fixed: int, keys: int) -> Tensor:
        method = hotrain.preset("hla", sampled=8 - rank_fixed)
        return torch.stack([gradients(x, w, g_y, method, key)[1] for key in range(keys)]) - exact

    norm = exact.square().sum()
    fixed_bias = float(of(8, 1)[0].square().sum() / norm)
    errors = of(4, 160)
    one_step = float(errors.square().sum((1, 2)).mean() / norm)
    sixteen_steps = float(errors.view(10, 16, 16, 16).mean(1).square().sum((1, 2)).mean() / norm)
    random_rows = float(of(0, 40).square().sum((1, 2)).mean() / norm)
    assert fixed_bias > 0
    assert one_step < 5 * fixed_bias  # measured: 3.2
    assert sixteen_steps < fixed_bias / 4  # half in amplitude
    assert random_rows > 50 * one_step  # measured: 130


def test_stratified_draws_have_less_noise_than_independent_ones() -> None:
    """Neighbouring tiles cover the tail. On tokens whose tiles resemble each other this removes most of the noise:
    the same 4+4 with a key of its own for every tile is the independent draw."""
    tiles = 12
    one = smooth(16, 8, 0.5, 2)
    x = one.repeat(tiles, 1)  # every tile alike: stratified draws are then exact over a group of three
    w, exact = torch.zeros(8, 8, dtype=F64), x.T @ x
    method = hotrain.preset("hla", sampled=4)
    stratified = torch.stack([gradients(x, w, x, method, key)[1] for key in range(20)]) - exact
    assert float(stratified.abs().max()) < 1e-10
    apart = torch.stack(
        [
            sum((gradients(one, w, one, method, 1000 * key + t)[1] for t in range(tiles)), torch.zeros(8, 8, dtype=F64))
            for key in range(20)
        ]
    )
    assert float((apart - exact).abs().max()) > 0.1


# --- noise -----------------------------------------------------------------------------------------------------------


def noise_of_codes(t: Tensor, bits: int, axis: str, rounding: str) -> float:
    """Noise over signal of integer codes of spread-out values: step²/6 stochastic, step²/12 nearest."""
    top = 2 ** (bits - 1) - 1
    largest = (
        t.abs().amax(1, keepdim=True) if axis == "token" else t.abs().amax(0) if axis == "column" else t.abs().max()
    )
    step = (largest / top).expand_as(t)
    return float(step.square().sum() / (6 if rounding == "stochastic" else 12) / t.square().sum())


def noise_of_fp8(t: Tensor, number: str) -> float:
    """Noise over signal of fp8 codes: step²/12 with a step of 2⁻³ (e4m3) or 2⁻² (e5m2) of the binade."""
    bits, smallest, top = {"e4m3": (3, -6, 448), "e5m2": (2, -14, 57344)}[number]
    scale = 2.0 ** math.ceil(math.log2(float(t.abs().max()) / top))
    binade = (t.abs() / scale).log2().floor().clamp(min=smallest)
    return float((scale * torch.exp2(binade - bits)).square().sum() / 12 / t.square().sum())


def noise_of_luq(t: Tensor) -> float:
    """(y − below)(above − y): the variance of a draw between neighbours."""
    y = t.abs() / (t.abs().max() / 128)
    below = torch.where(y < 1, 0.0, 2.0 ** y.clamp(min=1).log2().floor())
    above = torch.where(y < 1, 1.0, 2 * below)
    return float(((y - below) * (above - y)).sum() / y.square().sum())


def noise_of_sawb(t: Tensor) -> float:
    rounded, step = sawb(t)
    return float((rounded * step - t).square().sum() / t.square().sum())


def product(*noises: float) -> float:
    """Noise over signal of a product of two operands with independent errors."""
    a, b = noises
    return a + b + a * b


# The low-rank step on white data: fixed rows lose 1 − r/n; 4+4 adds (12·2)/16 = 1.5 (a row counts 3 with p = 1/3);
# half of the rows by norm add at most 1 (a row counts 2 with p = 1/2).
LOW_RANK = {"hot": 0.5, "hla": 0.5, "hot-unbiased": 1.5, "hot-importance": 1.0, "lbp-wht": 1 - 21 / 64, "dropout": 0.5}


def predicted(method: hotrain.Method, x: Tensor, w: Tensor, g_y: Tensor) -> tuple[float, float]:
    name = method.name
    path_x, path_w, saved = method.grad_input, method.grad_weight, method.saved
    if name == "luq":
        weight, kept = noise_of_sawb(w), noise_of_sawb(x)
        return product(noise_of_luq(g_y), weight), product(noise_of_luq(g_y), kept)
    noise_x, noise_w = 0.0, LOW_RANK.get(name, 0.0)
    if saved.number == "e4m3":  # white data are white in every basis
        fp8 = product(noise_of_fp8(g_y, path_w.number), noise_of_fp8(x, "e4m3"))
        of_x = product(noise_of_fp8(g_y, path_x.number), noise_of_fp8(w, "e4m3"))
        return of_x, noise_w + (1 + noise_w) * fp8
    if name == "lbp-wht":
        noise_x = noise_w
    if path_x.bits:
        on = path_x.transform == "hadamard"
        g, v = rotated(g_y, 1, on), rotated(w, 0, on)
        noise_x = product(
            noise_of_codes(g, path_x.bits, path_x.scale_axis, path_x.rounding),
            noise_of_codes(v, path_x.bits, path_x.weight_scale, path_x.weight_rounding),
        )
    if path_w.bits and saved.bits:
        rows = projection(layout((len(x),), 16, 16, 0, "sequency", None, True), 0) @ x if path_w.tile == 16 else x
        bits_noise = product(
            noise_of_codes(g_y, path_w.bits, "tensor", path_w.rounding),
            noise_of_codes(rows, saved.bits, "token" if saved.scale == "row" else "tensor", saved.rounding),
        )
        noise_w += (1 + noise_w) * bits_noise
    return noise_x, noise_w


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("method", EVERY, ids=str)
def test_signal_to_noise_floors(method: hotrain.Method, dtype: torch.dtype) -> None:
    """White data: noise over signal no worse than the bits predict, plus the dtype's own rounding.

    The prediction holds on average over the entries of a gradient; its spread with about 10,000 entries that share rows
    is under 0.5 dB. The dtype: one rounding of the result, 2⁻⁸ bf16, 2⁻¹¹ fp16; √K of them in float32 and float64.
    """
    draw = torch.Generator().manual_seed(0)
    x, w, g_y = (
        torch.randn(shape, dtype=F64, generator=draw).to(dtype) for shape in ((256, 128), (96, 128), (256, 96))
    )
    g_x, g_w = gradients(x, w, g_y, method)
    x, w, g_y = x.double(), w.double(), g_y.double()
    rounding = torch.finfo(dtype).eps / 2 * (16 if dtype in (torch.float32, F64) else 1)
    for which, got, exact, noise in zip(
        ("g_x", "g_w"), (g_x, g_w), (g_y @ w, g_y.T @ x), predicted(method, x, w, g_y), strict=True
    ):
        floor = -10 * math.log10(noise + rounding**2) - 0.5
        assert sqnr_db(got, exact) >= floor, which


def test_fp8_at_eight_bits_is_more_precise_than_int4_at_four() -> None:
    """g_x on units of the same speed: a relative error of 2⁻⁴ at most against a step of a seventh of the largest."""
    x, w, g_y = problem((256,), 64, 96)
    fp8, int4 = (gradients(x, w, g_y, hotrain.preset("hot", number=number))[0] for number in ("e4m3", "int"))
    assert sqnr_db(fp8, g_y @ w) > sqnr_db(int4, g_y @ w) + 10  # 28.5 and 12.8 measured


def test_per_token_scales_save_the_tokens_beside_an_outlier() -> None:
    """Why LQS exists: one token a thousand times the others (docs/maths.md: 56.6 against 65.9 % accuracy)."""
    x, w, g_y = problem((64,), 32, 32)
    g_y[10] *= 1000
    rest = torch.arange(64) != 10
    exact = (g_y @ w)[rest]
    token = gradients(x, w, g_y, hotrain.preset("hot", scale="token"))[0][rest]
    tensor = gradients(x, w, g_y, hotrain.preset("hot", scale="tensor"))[0][rest]
    assert sqnr_db(token, exact) > 10
    assert sqnr_db(tensor, exact) < 0


@pytest.mark.parametrize("name", ["hq8", "hot-unbiased"])
def test_an_output_has_the_g_w_of_its_own_scale(name: str) -> None:
    """Gradients of heads, or of q and k beside v, may be far below the others': times powers of two, to the bit."""
    x, w, g_y = (t.float() for t in problem((64,), 32, 24))
    method, factor = hotrain.preset(name, number="int"), 2.0 ** -torch.arange(24.0)
    alike, own = (gradients(x, w, g, method)[1] for g in (g_y, g_y * factor))
    assert torch.equal(own, alike * factor[:, None])


def test_the_rotation_spreads_an_outlier_channel() -> None:
    """Why H: one output channel of g_y ten times the others; what counts is the error of the others.

    Without H the step of every token is the outlier's; with H its energy is spread over 16 channels, the largest
    magnitude falls by up to 4 and the noise with its square: 3 dB are surely won.
    """
    _, _, g_y = problem((256,), outputs=32)
    g_y[:, 3] = 10 * g_y[:, 3].sign()
    path = hotrain.preset("hot", scale="token").grad_input
    with_h = rotated(backward.rotated_grad(g_y, path, KEY).dequantize(), 1, True)
    without = backward.rotated_grad(g_y, hotrain.preset("int4", scale="token", rounding="stochastic").grad_input, KEY)
    rest = torch.arange(32) != 3
    assert sqnr_db(with_h[:, rest], g_y[:, rest]) > sqnr_db(without.dequantize()[:, rest], g_y[:, rest]) + 3


def test_the_rotation_would_give_fp8_two_binades() -> None:
    """What fp8 forgoes without H: an outlier sets the one scale, and codes below e4m3's normal numbers lose their bits.

    One entry 2¹⁶ times the others: rotated it is a quarter of that, and the steps below the smallest normal number are
    a quarter as large. That is 12 dB where all codes are below it, and 10 dB measured here, where the largest do not.
    """
    _, w, g_y = problem((64,), 32, 32)
    g_y[10, 3] = 2.0**16
    rest = torch.arange(64) != 10

    def error(transform: str | None) -> float:
        path = hotrain.GradInput(transform, bits=8, number="e4m3", rounding="nearest")
        return sqnr_db(backward.grad_input(g_y, w, hotrain.Method("one", path), KEY)[rest], (g_y @ w)[rest])

    assert error("hadamard") > error(None) + 8
    assert error(None) > 10  # and what is left without it is still g_x


@pytest.mark.parametrize("outlier", ["token", "channel"])
def test_an_ordinary_outlier_costs_fp8_nothing_without_the_rotation(outlier: str) -> None:
    """Why H can go: the error of a code is relative to its own entry, until 14 binades below the largest.

    One token or one channel 2⁶ times the others: each operand errs by 2.6 % of its deviation as on white data
    (docs/maths.md), g_x of the other tokens by 3.7 %, which is 28.6 dB; 1 dB is left for the few entries.
    """
    x, w, g_y = problem((64,), 32, 32)
    if outlier == "token":
        g_y[10] *= 2.0**6
    else:
        g_y[:, 3] *= 2.0**6
    rest = torch.arange(64) != 10
    g_x, _ = gradients(x, w, g_y, hotrain.preset("hot", number="e4m3"))
    assert sqnr_db(g_x[rest], (g_y @ w)[rest]) > 27.6


# --- edges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("method", EVERY, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_non_finite_g_y_reaches_both_gradients(method: hotrain.Method, bad: float, dtype: torch.dtype) -> None:
    """Wherever the exact gradient is not finite, neither is ours: GradScaler and anomaly detection depend on it.

    The bad entry in a square tile, in the border line, and in the dense class token; keys so that dropout drops it too.
    """
    x, w, g_y = (t.to(dtype) for t in problem((2, 50)))
    for token, key in ((0, 1), (5, 2), (49, 3), (30, 4), (31, 5)):
        broken = g_y.clone()
        broken[1, token, 7] = bad
        g_x, g_w = gradients(x, w, broken, method, key, Grid(7, 7, 1))
        assert not torch.isfinite(g_x[1, token]).any()
        assert not torch.isfinite(g_w[7]).any()


@pytest.mark.parametrize("method", FP8, ids=str)
def test_fp8_confines_a_non_finite_token(method: hotrain.Method) -> None:
    """Unlike an integer's, an fp8 scale is that of the finite entries: the other tokens' g_x is what it would be with a
    zero there, and so is g_w of the other output channels."""
    x, w, g_y = problem((48,), outputs=48)
    g_y[20] = 0
    want_x, want_w = gradients(x, w, g_y, method)
    g_y[20, 7] = math.nan
    g_x, g_w = gradients(x, w, g_y, method)
    others = torch.arange(48) != 20
    torch.testing.assert_close(g_x[others], want_x[others], rtol=0, atol=0)
    assert g_w[7].isnan().all()
    torch.testing.assert_close(g_w[torch.arange(48) != 7], want_w[torch.arange(48) != 7], rtol=0, atol=0)


@pytest.mark.parametrize("name", EVERY, ids=str)
def test_zero_gradients_stay_zero(name: hotrain.Method) -> None:
    x, w, g_y = problem((2, 50))
    for g in gradients(x, w, torch.zeros_like(g_y), name):
        assert float(g.abs().max()) == 0


@pytest.mark.parametrize("name", EVERY, ids=str)
def test_zero_inputs_and_weights(name: hotrain.Method) -> None:
    x, w, g_y = problem((2, 50))
    g_x, g_w = gradients(torch.zeros_like(x), torch.zeros_like(w), g_y, name)
    assert float(g_x.abs().max()) == 0
    assert float(g_w.abs().max()) == 0


@pytest.mark.parametrize("name", EVERY, ids=str)
@pytest.mark.parametrize("scale", [1e-41, 1e-30, 1e15], ids=["denormal", "small", "large"])
def test_extreme_magnitudes_stay_finite(name: hotrain.Method, scale: float) -> None:
    """float32 g_y: a denormal rounds to zero or to one smallest step, nothing divides by zero or overflows."""
    x, w, g_y = (t.float() for t in problem((2, 50)))
    for g in gradients(x, w, g_y * scale, name):
        assert torch.isfinite(g).all()
    if scale == 1e-30:
        for g, h in zip(gradients(x, w, g_y * 2.0**-100, name), gradients(x, w, g_y, name), strict=True):
            torch.testing.assert_close(g * 2.0**100, h, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_constant_operands(name: str) -> None:
    """Every operand a constant, tokens a whole number of 16×… tiles: only row 0 is filled, so no low-pass loses it.

    int8 and int4 hold a constant exactly; rotated blocks of O = 16 hold one non-zero value; drawn rows see zeros.
    """
    x, w = torch.full((64, 8), 0.3, dtype=F64), torch.full((16, 8), -0.7, dtype=F64)
    g_y = torch.full((64, 16), 0.11, dtype=F64)
    g_x, g_w = gradients(x, w, g_y, name, grid=Grid(8, 8))
    torch.testing.assert_close(g_x, g_y @ w, rtol=1e-12, atol=0)
    if name != "dropout":
        torch.testing.assert_close(g_w, g_y.T @ x, rtol=1e-12, atol=0)


@pytest.mark.parametrize("method", EVERY, ids=str)
def test_one_outlier_in_g_y(method: hotrain.Method) -> None:
    """It sets the scale and arrives itself: its own contribution to g_x within a step of the largest code."""
    x, w, g_y = problem((50,))
    g_y *= 1e-3
    g_y[20, 5] = 1e3
    g_x, _ = gradients(x, w, g_y, method)
    assert torch.isfinite(g_x).all()
    if method.name != "lbp-wht":  # whose g_x spreads the token over its tile
        assert sqnr_db(g_x[20], 1e3 * w[5]) > 10


def test_dropped_share() -> None:
    """Each entry by itself with probability ½; n = 2¹⁸: 5σ = 0.005."""
    g = torch.ones(512, 512)
    kept = published.dropped(g, 0.5, 1)
    assert set(kept.flatten().tolist()) == {0.0, 1.0}
    assert abs(float(kept.mean()) - 0.5) < 5 * 0.5 / 512
    t = torch.randn(9, 7, dtype=F64)
    assert torch.equal(published.dropped(t, 0.25, 3), dropped(t, 0.25, 3))


def test_luq_prediction_is_about_its_codes() -> None:
    """Guards `noise_of_luq` above: the measured noise of the oracle's codes is the predicted variance (n = 4,096)."""
    t = torch.randn(64, 64, dtype=F64, generator=torch.Generator().manual_seed(0))
    rounded, alpha = luq(t, 1, 2)
    measured = float((rounded * alpha - t).square().sum() / t.square().sum())
    assert measured == pytest.approx(noise_of_luq(t), rel=0.1)

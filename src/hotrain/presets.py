"""The presets: methods by name. Each function is one preset; its docstring cites the source and states its costs."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from .method import KNOBS, GradInput, GradWeight, Method, Saved

DEFAULT = "hq8"  # of `hotrain.convert` and of layers that are not told

_PRESETS: dict[str, Callable[[], Method]] = {}


def _register(make: Callable[[], Method]) -> Callable[[], Method]:
    _PRESETS[make.__name__.replace("_", "-")] = make
    return make


def presets() -> tuple[str, ...]:
    """The names that `preset` accepts."""
    return tuple(_PRESETS)


_NO_PRESETS = ("fp8", "int8", "e4m3", "e5m2")  # numbers, which users may take for methods


def preset(name: str, /, **overrides: Any) -> Method:
    """The method of that name, with overrides applied.

    Args:
        name: one of `presets`.
        **overrides: as in `Method.override`.

    Raises:
        ValueError: the name or an override is not accepted; the message names what is.

    Examples:
        >>> print(preset("hot", rank=4))
        hot  g_x:H16·int4/auto  g_w:P4of16·int8  saved:int8/tensor
    """
    if name not in _PRESETS:
        low = str(name).lower()
        near = [low] if low in _PRESETS else difflib.get_close_matches(low, _PRESETS, n=3, cutoff=0.55)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        if name in _NO_PRESETS:
            hint = " Both gradients in 8 bits are 'hq8', with number='e4m3' in fp8 and with number='int' in integers."
        if (base := str(name).partition(":"))[1] and base[0] in _PRESETS:  # as the command line takes it
            hint = f" In Python the fields of {base[0]!r} are arguments, as in hotrain.preset('hot', rank=4)."
        raise ValueError(f"unknown preset {name!r}.{hint} Known presets: {', '.join(_PRESETS)}")
    return _PRESETS[name]().override(**overrides)


def describe(name: str) -> str:
    """The docstring of a preset: its source, and what it loses."""
    preset(name)
    return (_PRESETS[name].__doc__ or "").strip()


@_register
def exact() -> Method:
    """Backpropagation as PyTorch does it. The control of every comparison."""
    return Method("exact")


@_register
def hot() -> Method:
    """HOT: "Hadamard-based Optimized Training", CVPR 2025, arXiv 2503.21261 (abstract and supplement B–G).

    g_x: output channels rotated by H16, int4, stochastic rounding of g_y, a per-token or per-tensor scale as LQS
    chooses. g_w: 8 of 16 low-pass rows along the tokens, int8. Saved: the int8 codes of P x, an eighth of fp32.
    The low-pass loses the energy of the other 8 rows: g_w is biased. ``number="e4m3"`` has all codes in fp8, 8 bits
    on both paths, rounded to nearest with per-tensor scales.
    """
    return Method("hot", GradInput("hadamard", bits=4), GradWeight(tile=16, rank=8, bits=8), Saved(bits=8), KNOBS)


@_register
def hot_unbiased() -> Method:
    """Ours: HOT with an unbiased low-rank step and unbiased rounding of every operand (docs/maths.md).

    4 low-pass rows are fixed; 4 of the other 12 are drawn for every block of 16 tokens and scaled by √3, so that
    E[PᵀP] = I and E[g_w] is exact; w is rounded stochastically too, so that E[g_x] is exact. Same bytes and same
    product sizes as HOT. Where the device has fp8 matrix units it runs in fp8, which is rounded to nearest: unbiased
    in its low-rank step only; ``number="int"`` keeps it to integers.
    """
    return Method(
        "hot-unbiased",
        GradInput("hadamard", bits=4, weight_scale="column", weight_rounding="stochastic"),
        GradWeight(tile=16, rank=8, sampled=4, bits=8, scale="column"),
        Saved(bits=8, rounding="stochastic"),
        KNOBS,
        automatic=True,
    )


@_register
def hla() -> Method:
    """HLA of EVMT-HLA ("Efficient vision model training by Hadamard low-rank adaptation", blog and ESL-HLA).

    g_x exact (its rotation without quantization is the identity, so it is skipped); g_w from 8 of 16 low-pass rows
    in floating point. Saved: P x, half of x. Biased as HOT is.
    """
    return Method("hla", GradInput("hadamard"), GradWeight(tile=16, rank=8), Saved(), KNOBS - {"number"})


@_register
def hq() -> Method:
    """HOT without its low-rank step (HOT, Table 2, r = 16): full rank, g_x int4, g_w int8, x saved in int8.

    ``number="e4m3"`` has all codes in fp8, as in `hot`.
    """
    return Method("hq", GradInput("hadamard", bits=4), GradWeight(tile=16, rank=16, bits=8), Saved(bits=8), KNOBS)


@_register
def hq8() -> Method:
    """Ours, and the default of `hotrain.convert`: full rank in 8 bits, and compressed activations between the layers.

    Full rank and 8 bits on both paths: fp8 without a rotation where the device has fp8 matrix units, else rotated
    integers (``number="int"`` or ``"e4m3"`` fixes it). The activations between the layers are compressed too
    (``memory="block"``). A low rank is faster and smaller still; its noise, biased or unbiased, costs as much as a
    smaller batch does (docs/maths.md).
    """
    return Method(
        "hq8",
        GradInput("hadamard", bits=8, weight_scale="column"),
        GradWeight(tile=16, rank=16, bits=8, scale="column"),
        Saved(bits=8),
        KNOBS,
        memory="block",
        automatic=True,
    )


@_register
def hq4() -> Method:
    """Ours: full rank, x saved rotated along the tokens in packed int4, per-row scales, stochastic rounding.

    The bytes of HOT (r = 8 in int8) without discarding a row; backward folds the row scales into g_y, so that the
    product along the tokens stays one of codes. ``number="e4m3"`` has g_y and w in fp8, and multiplies x's codes as the
    e4m3 numbers that they are.
    """
    return Method(
        "hq4",
        GradInput("hadamard", bits=4),
        GradWeight(tile=16, rank=16, bits=8),
        Saved(bits=4, scale="row", rounding="stochastic"),
        KNOBS,
    )


@_register
def hot_importance() -> Method:
    """Ours: all rows of x saved in int4, as `hq4` does, half of them multiplied, drawn in backward by importance.

    The bytes of HOT (r = 8 in int8) and its arithmetic, but what is left out is chosen when both operands are known: of
    the rows of P x and P g_y half are drawn with probabilities proportional to ‖P g_y‖·‖P x‖, and weighted, so that
    E[g_w] is exact (docs/maths.md). Of convolutions whose patches overlap it is half of the lines of the output. Where
    the device has fp8 matrix units, g_y and w are in fp8, as with ``number="e4m3"`` of `hq4`: one integer scale for
    P g_y costs more than the draw late in training (docs/noise.md). ``number="int"`` keeps it to integers, each rounded
    without bias.
    """
    return Method(
        "hot-importance",
        GradInput("hadamard", bits=4, weight_scale="column", weight_rounding="stochastic"),
        GradWeight(tile=16, rank=16, bits=8, share=0.5),
        Saved(bits=4, scale="row", rounding="stochastic"),
        KNOBS,
        automatic=True,
    )


@_register
def lbp_wht() -> Method:
    """LBP-WHT (NeurIPS 2023; read from SLDGroup/LBP-WHT's description): both gradients low-rank.

    Tiles of 8×8 tokens, the 21 Walsh bases with v+h < 6 (LP_L1), floating point. Border tiles are padded with
    zeros, not reflected: reflection counts border tokens twice in g_w.
    """
    return Method("lbp-wht", GradInput("lowpass"), GradWeight(tile=64, rank=21), Saved(), frozenset({"rank", "order"}))


@_register
def luq() -> Method:
    """LUQ: logarithmic unbiased quantization of gradients to 4 bits (Chmiel et al., ICLR 2023, OpenReview yTbNYYcopd).

    g_y as a sign and one of 8 powers of two, unbiased (stochastic underflow and log rounding); w and the saved x in
    SAWB int4 with the clip bounded by amax. The largest |g_y| sets the scale (the published code
    takes the largest g_y, which is wrong for negative outliers). The forward product stays exact here.
    """
    return Method(
        "luq",
        GradInput(None, bits=4, number="luq", scale="tensor"),
        GradWeight(bits=4, number="luq"),
        Saved(bits=4, number="sawb"),
    )


@_register
def int4() -> Method:
    """Naive int4: every operand of both products in int4, per-tensor scales, no transform, rounded to nearest.

    The control of HOT's Table 4 (which does not state its rounding; `rounding="stochastic"` gives the other reading).
    """
    return Method(
        "int4",
        GradInput(None, bits=4, scale="tensor", rounding="nearest"),
        GradWeight(bits=4, rounding="nearest"),
        Saved(bits=4),
        frozenset({"grad_input_bits", "grad_weight_bits", "saved_bits", "scale", "rounding"}),
    )


@_register
def dropout() -> Method:
    """EVMT-HLA's control: half of the elements of g_y, drawn at random, are missing from g_w; not rescaled.

    The blog does not say where elements are dropped. Here it is the path that HLA halves, and, like HLA, it does not
    rescale for what it discards. x is saved whole.
    """
    return Method("dropout", grad_weight=GradWeight(drop=0.5))

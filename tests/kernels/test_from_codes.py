"""The quantize kernel on a matrix that is given by its codes, against the same kernel on the matrix."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import few, gpu_only, key_on, layout_of
from torch import Tensor

pytest.importorskip("triton")

from hotrain.compress.slopes import ACTIVATIONS
from hotrain.kernels import quantize_kernels as C
from hotrain.kernels.reference import kept_rows
from hotrain.layer_record import AmaxHistory
from hotrain.saved import Grouped

# numpy, of which the interpreter is made, warns of exponentials that overflow
pytestmark = [pytest.mark.usefixtures("poison"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]

# (channels, group): a per-row scale, whose halves are a block of channels, three of them, several; groups of a block,
# of two; those of ViT.
CASES = [
    (64, 64),
    (96, 96),
    *gpu_only((384, 384), (768, 768), (2048, 2048)),
    (64, 32),
    (256, 128),
    *gpu_only((768, 256)),
]


def coded(
    tokens: int, channels: int, group: int, bits: int, dtype: torch.dtype, device: torch.device, normed: bool = False,
    w: torch.dtype | None = None, b: torch.dtype | None = None, name: str = "",
) -> tuple[C.Coded, Tensor]:  # fmt: skip
    """Codes of a random matrix, and the matrix, in float64's arithmetic but for the last rounding."""
    x = torch.randn(tokens, channels, device=device) * torch.exp2(torch.arange(tokens, device=device) % 5)[:, None]
    codes, scale = Grouped(bits, whole=True).keep(x.view(-1, group))
    t = Grouped(bits, whole=True).restore((codes, scale), (len(codes), group), torch.float64).view(tokens, channels)
    gamma = None if w is None else torch.randn(channels, device=device).to(w)
    beta = None if b is None else torch.randn(channels, device=device).to(b)
    if gamma is not None:
        t = t * gamma.double()
    if beta is not None:
        t = t + beta.double()
    if name:
        t = ACTIVATIONS[name].f(t)
    codes, scale = codes.view(tokens, channels // group, -1), scale.view(tokens, -1, 1)
    return C.Coded(codes, scale, gamma, beta, normed, name, bits, dtype), t.to(dtype)


def compare(
    source: C.Coded, t: Tensor, lead: tuple[int, ...], output: C.Output, steps: int = 1, rough: bool = False
) -> None:
    """`rough`: t is a function's result, which the kernel computes to 2⁻¹⁰ of max(1, |argument|)."""
    lay = layout_of(lead, None, 16, 0)
    key = key_on(t.device)
    rows = kept_rows(lay, key)
    found = []
    for matrix in (source, t):
        history = AmaxHistory.on(t.device)
        for _ in range(steps):  # from the second on the scale is known
            _, _, codes, scale, _ = C.compress(matrix, lay, rows, key, projected=output, history=history)
        found.append((codes, scale))
    (got, got_scale), (want, want_scale) = found
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if want_scale is not None:
        torch.testing.assert_close(got_scale, want_scale, rtol=1e-6, atol=0)
    # float32's arithmetic against one rounding: a code moves where that crosses a boundary, of fp8 by a step of 2⁻³.
    moved = got.double() != want.double()
    assert few(moved, 0.05 if rough else 1e-3)
    step = 1.01 if output.number == C.INT else 0.13 * want.double().abs() + 2.0**-9
    if output.number == C.COPY:
        step = 2.0**-7 * want.double().abs().amax()
    if rough:
        assert want_scale is not None
        step += 2.0**-10 * max(1.0, float(t.double().abs().amax())) / want_scale.double()
    assert ((got.double() - want.double()).abs() <= step).all()


OUTPUTS = {"e4m3": C.Output(C.E4M3, 448.0), "int8": C.Output(C.INT, 127.0), "copy": C.Output(C.COPY)}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize(("channels", "group"), CASES)
def test_codes_alone(channels: int, group: int, output: str, bits: int, device: torch.device) -> None:
    """Of rows that fill blocks of tokens, and of some that do not."""
    for lead in ((2, 64), (3, 21)):
        compare(*coded(lead[0] * lead[1], channels, group, bits, torch.float32, device), lead, OUTPUTS[output])


@pytest.mark.parametrize("w", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("b", [None, torch.float32], ids=str)
@pytest.mark.parametrize("channels", [96, *gpu_only(768)])
def test_a_norms_result(channels: int, w: torch.dtype | None, b: torch.dtype | None, device: torch.device) -> None:
    """γ and β of each channel; where there is no token, there is no β either."""
    made = coded(63, channels, channels, 4, torch.float32, device, True, w, b)
    compare(*made, (3, 21), OUTPUTS["e4m3"], steps=2)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "hardswish", "relu"])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_functions_result(name: str, bits: int, device: torch.device) -> None:
    """A few codes of GELU's, of which the kernel has the tanh form, and of what needs a tanh, are a step off."""
    made = coded(42, 128, 64, bits, torch.float32, device, name=name)
    compare(*made, (2, 21), OUTPUTS["e4m3"], rough=name in ("gelu", "gelu_tanh", "silu"))


@pytest.mark.parametrize("dtype", [torch.float16, *gpu_only(torch.bfloat16)])
def test_the_matrix_is_rounded_to_its_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """As one that is written and read again."""
    compare(*coded(64, 96, 96, 4, dtype, device, True, torch.float32, torch.float32), (1, 64), OUTPUTS["int8"])


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "hardswish"])
@pytest.mark.parametrize(("channels", "group", "bits"), [(128, 64, 8), (96, 96, 4), *gpu_only((3072, 128, 8))])
@pytest.mark.parametrize("number", [C.E4M3, C.INT])
def test_the_gradient_of_a_function(
    name: str, channels: int, group: int, bits: int, number: int, device: torch.device
) -> None:
    """g f'(x), rotated, projected and summed, of a g whose rows are not neighbours; 63 tokens fill no block."""
    source, x = coded(63, channels, group, bits, torch.float32, device)
    g = torch.randn(63, 2 * channels, device=device)[:, :channels]
    source = source._replace(name=name, g=g)
    t = (g.double() * ACTIVATIONS[name].slope(x.double())).float()
    lay, key = layout_of((3, 21), None, 16, 0), key_on(device)
    rows, limit = kept_rows(lay, key), 448.0 if number == C.E4M3 else 127.0
    formats = C.Output(number, limit), C.Output(number, limit)
    found = []
    for matrix in (source, t):
        history = AmaxHistory.on(device)
        for _ in range(2):  # the second time the scale is known
            got = C.compress(matrix, lay, rows, key, *formats, sums=True, history=history)
        found.append([part.double() for part in got if part is not None])
    unit = 2.0**-9 * float(g.abs().amax())  # of f': 0.0009 for GELU in its tanh form, 2⁻¹⁰ for one tanh
    for place, scale_at in ((0, 1), (2, 3)):
        (got, got_scale), (want, want_scale) = ((each[place], each[scale_at]) for each in found)
        torch.testing.assert_close(got_scale, want_scale, rtol=2**-8, atol=0)
        assert few(got != want, 0.05)
        step = 1.01 if number == C.INT else 0.13 * want.abs() + 2.0**-9
        error = 4 * unit / want_scale  # a transform adds sixteen, a quarter each
        assert ((got - want).abs() <= step + error).all()
    torch.testing.assert_close(found[0][4], found[1][4], rtol=0, atol=63 * unit)

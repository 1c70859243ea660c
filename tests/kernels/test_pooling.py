"""The kernels of max pooling against PyTorch's, forward to the bit and gradients in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")

from hotrain import autograd, kernels
from hotrain.compress.interpose import Compressed
from hotrain.compress.operators import base
from hotrain.compress.report import Buffers
from hotrain.kernels import launch, pooling

pytestmark = [pytest.mark.usefixtures("poison"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# x, and kernel, stride, padding, ceil: ResNet's; windows that touch, that leave gaps, that overlap in one direction;
# a last window that reaches over the image; one that begins behind it and is none; one element; more channels than a
# program has elements.
CALLS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "ResNet": ((2, 20, 13, 12), (3, 2, 1, False)),
    "touching": ((1, 48, 8, 6), (2, 2, 0, False)),
    "gaps": ((2, 3, 11, 9), ((2, 1), (3, 4), 0, False)),
    "one direction": ((1, 17, 7, 10), ((5, 2), (1, 2), (2, 1), False)),
    "ceil": ((2, 5, 10, 8), (3, 2, 0, True)),
    "ceil, none behind": ((1, 4, 5, 7), (2, 2, 1, True)),
    "one element": ((2, 9, 4, 5), (1, 1, 0, False)),
    "channels": ((1, 1100, 3, 3), (3, 2, 1, False)),
    "the largest": ((1, 6, 9, 9), (7, 3, 3, False)),
}


def geometry(call: tuple[Any, ...]) -> tuple[list[int], list[int], list[int], bool]:
    kernel, stride, padding = ([v, v] if isinstance(v, int) else list(v) for v in call[:3])
    return kernel, stride, padding, call[3]


def pool(x: Tensor, call: tuple[Any, ...]) -> Tensor:
    return F.max_pool2d(x, *call[:3], 1, call[3])


@pytest.fixture
def compressed(monkeypatch: pytest.MonkeyPatch) -> Compressed:
    """A model's forward: the kernels in the place of PyTorch's function, in the interpreter too."""
    monkeypatch.setattr(autograd, "KERNELS", dict.fromkeys(("cpu", "cuda"), kernels))
    monkeypatch.setattr(base, "SMALL", 2)
    return Compressed(Buffers())


def images(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Few different numbers, so that many are equal; NaN, and infinities of both signs over whole windows."""
    x = torch.randint(-3, 4, shape, device=device).to(dtype)
    x[:, 0, :3, :3] = -float("inf")
    x[:, 1, 1, 2] = float("nan")
    x[:, 2, :2] = float("inf")
    return x.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_forward_is_pytorchs(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """The maxima to the bit, and in the same places: of equal numbers the first, a NaN before all, none in padding."""
    shape, call = CALLS[name]
    x = images(shape, dtype, device)
    kernel, stride, padding, ceil = geometry(call)
    y, places = pooling.max_pool(x, kernel, stride, padding, ceil)
    # In float64 every loop of PyTorch's for a CPU is the plain one. On a GPU, in channels-last, the index of a window
    # that is -inf throughout is 0, wherever the window is.
    found = F.max_pool2d(x.double().cpu(), kernel, stride, padding, 1, ceil, return_indices=True)
    want, index = (t.to(device) for t in found)
    assert y.dtype == dtype
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(y.double().nan_to_num(99), want.nan_to_num(99))
    top = (torch.arange(y.shape[2], device=device) * stride[0] - padding[0]).view(-1, 1)
    left = torch.arange(y.shape[3], device=device) * stride[1] - padding[1]
    rows, columns = places.long() // kernel[1] + top, places.long() % kernel[1] + left
    same = rows * shape[3] + columns == index
    # Of several NaN PyTorch's loops for a CPU and a GPU take the last, others any.
    assert (same | want.isnan()).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_the_sums_of_pytorchs(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """In float64, with one rounding; each element is written once."""
    shape, call = CALLS[name]
    kernel, stride, padding, ceil = geometry(call)
    x = torch.randn(shape, device=device).to(dtype).to(memory_format=torch.channels_last)
    y, places = pooling.max_pool(x, kernel, stride, padding, ceil)
    g = torch.randn_like(y)
    got = pooling.max_pool_gradient(g, places, shape, kernel, stride, padding)
    leaf = x.double().requires_grad_()
    for_size = F.max_pool2d(leaf, kernel, stride, padding, 1, ceil)
    (want,) = torch.autograd.grad(for_size, leaf, g.double(), retain_graph=True)
    (size,) = torch.autograd.grad(for_size, leaf, g.double().abs())
    cut = 1.0 if device.type == "cpu" else 0.5  # the interpreter cuts bfloat16 off
    assert got.dtype == dtype
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert ((got.double() - want).abs() <= cut * torch.finfo(dtype).eps * want.abs() + 2.0**-22 * size).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_maxima_are_elements_of_x_to_the_bit(dtype: torch.dtype, device: torch.device) -> None:
    """Of random bits: zeros keep their sign, NaN their sign and payload."""
    bits = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    x = torch.randint(-(2**31), 2**31, (2, 33, 8, 6), device=device).to(bits)
    x.view(-1)[::3] = torch.tensor(-0.0, dtype=dtype).view(bits)
    x.view(-1)[::4] = 0
    x.view(-1)[::5] = torch.tensor(float("nan"), dtype=dtype).view(bits) + torch.randint(9, (), dtype=bits)
    x = x.to(memory_format=torch.channels_last)
    y, places = pooling.max_pool(x.view(dtype), [2, 2], [2, 2], [0, 0], False)
    windows = x.unfold(2, 2, 2).unfold(3, 2, 2).flatten(4)
    assert torch.equal(y.view(bits), windows.gather(4, places.long()[..., None])[..., 0])


def test_each_dtype_has_a_case_of_its_own(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an equal one, a launch would run what was compiled for another dtype; the interpreter compiles nothing."""
    cases: list[Any] = []
    monkeypatch.setattr(launch, "launch", lambda kernel, programs, case, *args, **options: cases.append(case))
    pooling._plan.cache_clear()  # a plan that was run before launches what was compiled
    window = [3, 3], [2, 2], [1, 1]
    for dtype in DTYPES:
        x = torch.empty(2, 20, 13, 12, dtype=dtype, device=device).to(memory_format=torch.channels_last)
        pooling.max_pool_gradient(*pooling.max_pool(x, *window, False), x.shape, *window)
    assert len(set(cases)) == 2 * len(DTYPES)


def test_another_image_size_compiles_nothing_new(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Detectors' batches have sizes of their own: what a kernel is compiled for must not depend on them."""
    compiled: list[Any] = []
    monkeypatch.setattr(
        launch,
        "launch",
        lambda kernel, grid, case, args, constants, **_: compiled.append((kernel, tuple(constants.items()))),
    )
    window = [3, 3], [2, 2], [1, 1]
    for size in ((13, 12), (40, 31)):
        x = torch.empty(2, 20, *size, device=device).to(memory_format=torch.channels_last)
        pooling.max_pool_gradient(*pooling.max_pool(x, *window, False), x.shape, *window)
    assert len(set(compiled)) == 2


WRONG: dict[str, tuple[Any, ...]] = {
    "too much padding": (2, 2, 2, False),
    "negative padding": (2, 2, (-1, 0), False),
    "no stride": (2, (0, 2), 0, False),
    "no window": ((0, 2), 2, 0, False),
    "a window larger than the image": (7, 2, 0, False),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_raise_pytorchs_error(name: str, compressed: Compressed, device: torch.device) -> None:
    x = torch.randn(2, 20, 6, 6, device=device).to(memory_format=torch.channels_last).requires_grad_()
    with pytest.raises(RuntimeError) as expected:
        pool(x, WRONG[name])
    with pytest.raises(RuntimeError) as raised, compressed:
        pool(x, WRONG[name])
    assert str(raised.value) == str(expected.value)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
@pytest.mark.parametrize("name", ["ResNet", "ceil"])
def test_eager_mode_runs_them(
    name: str, layout: torch.memory_format, compressed: Compressed, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In channels-last; a second derivative, and other layouts, are PyTorch's. Gradients in whichever layout."""
    calls: list[str] = []
    run = kernels.run
    monkeypatch.setattr(kernels, "run", lambda name, *args: (calls.append(name), run(name, *args))[1])
    shape, call = CALLS[name]
    x = torch.randn(shape, device=device).to(memory_format=layout).requires_grad_()
    with compressed:
        y = pool(x, call)
    want = pool(x, call)
    assert torch.equal(y, want)
    assert y.stride() == want.stride()
    for g in (torch.randn_like(y), torch.randn(y.shape, device=device)):
        (got,) = torch.autograd.grad(y, x, g, retain_graph=True)
        (expected,) = torch.autograd.grad(want, x, g, retain_graph=True)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
        assert got.stride() == expected.stride()
    ours = layout == torch.channels_last
    assert calls == (["pooling.max_pool"] + ["pooling.max_pool_gradient"] * 2 if ours else [])
    g = torch.randn_like(y).requires_grad_()
    second = [
        torch.autograd.grad(torch.autograd.grad(z, x, g, create_graph=True)[0].square().sum(), g)[0] for z in (y, want)
    ]
    torch.testing.assert_close(*second)

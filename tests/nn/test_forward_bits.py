"""The forward of a converted layer is the exact layer's, to the bit: every kind, option, dtype, autocast."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize

import hotrain

# PyTorch's own remark on even kernels
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "3x3": {"kernel_size": 3, "padding": 1},
    "1x1": {"kernel_size": 1},
    "1x1 strided": {"kernel_size": 1, "stride": 2},
    "patchify": {"kernel_size": 4, "stride": 4},
    "strided": {"kernel_size": 3, "stride": 2, "padding": 1},
    "oblong": {"kernel_size": (3, 5), "stride": (1, 2), "padding": (0, 2)},
    "dilated": {"kernel_size": 3, "dilation": (2, 3), "padding": 2},
    "same": {"kernel_size": (4, 3), "padding": "same"},
    "valid": {"kernel_size": 3, "padding": "valid"},
    "reflect": {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    "replicate": {"kernel_size": 3, "padding": (2, 1), "padding_mode": "replicate"},
    "circular": {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
    "same reflect": {"kernel_size": (4, 3), "padding": "same", "padding_mode": "reflect"},
    "groups": {"kernel_size": 3, "groups": 2},
    "depthwise": {"kernel_size": 3, "padding": 1, "groups": 32},
    "no bias": {"kernel_size": 3, "bias": False},
}


def layer_of(kind: str) -> tuple[nn.Module, Tensor]:
    """A layer and an input of 13 × 14 positions or 37 tokens: nothing divides 16."""
    if kind == "linear":
        return nn.Linear(33, 45), torch.randn(3, 37, 33)
    if kind == "linear no bias":
        return nn.Linear(33, 45, bias=False), torch.randn(3, 37, 33)
    if kind == "conv1d":
        from transformers.pytorch_utils import Conv1D

        return Conv1D(45, 33), torch.randn(3, 37, 33)
    return nn.Conv2d(32, 64, **CONVOLUTIONS[kind]), torch.randn(2, 32, 13, 14)


def assert_same_bits(layer: nn.Module, x: Tensor, method: str = "hot-unbiased", autocast: Any = None) -> None:
    exact = copy.deepcopy(layer)
    hotrain.convert(layer, method, filter_fn=lambda module, name: True)
    with autocast or nullcontext():
        want, got = exact(x), layer(x)
    assert "Backward" in got.grad_fn.name()  # the method's path ran, not the parent's
    assert got.grad_fn.name() != want.grad_fn.name()
    assert got.dtype == want.dtype
    assert got.stride() == want.stride()  # channels_last stays channels_last
    assert torch.equal(got, want)


KINDS = ["linear", "linear no bias", "conv1d", *CONVOLUTIONS]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_forward_is_bit_identical(kind: str, dtype: torch.dtype) -> None:
    layer, x = layer_of(kind)
    assert_same_bits(layer.to(dtype), x.to(dtype))


@pytest.mark.parametrize("inner", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["linear", "conv1d", "3x3", "patchify", "reflect"])
def test_forward_is_bit_identical_under_autocast(kind: str, dtype: torch.dtype, inner: torch.dtype) -> None:
    """Autocast casts float32 and half inputs and leaves float64 alone; the converted layer does the same by hand."""
    layer, x = layer_of(kind)
    assert_same_bits(layer.to(dtype), x.to(dtype), autocast=torch.autocast("cpu", inner))


@pytest.mark.parametrize("method", [m for m in hotrain.presets() if m != "exact"])
@pytest.mark.parametrize("kind", ["linear", "conv1d", "3x3"])
def test_no_method_touches_the_forward(kind: str, method: str) -> None:
    assert_same_bits(*layer_of(kind), method=method)


@pytest.mark.parametrize("kind", list(CONVOLUTIONS))
def test_channels_last(kind: str) -> None:
    layer, x = layer_of(kind)
    assert_same_bits(layer.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last))


def test_an_input_that_is_no_contiguous_block() -> None:
    """Attention hands Linear layers transposed views."""
    assert_same_bits(nn.Linear(33, 45), torch.randn(37, 3, 33).transpose(0, 1))


def test_an_image_without_a_batch_axis() -> None:
    assert_same_bits(nn.Conv2d(32, 64, 3), torch.randn(32, 13, 14))


class Noise(nn.Module):
    """A parametrization that draws whenever the weight is read in training."""

    def forward(self, w: Tensor) -> Tensor:
        return w + 0.1 * torch.randn_like(w) if self.training else w


PARAMETRIZATIONS: dict[str, Callable[[nn.Module], object]] = {
    "noise": lambda layer: parametrize.register_parametrization(layer, "weight", Noise()),
    "noise of the bias": lambda layer: parametrize.register_parametrization(layer, "bias", Noise()),
    "spectral norm": nn.utils.parametrizations.spectral_norm,
}


def parametrized_pair(kind: str, way: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """Exact and converted, each with its parametrization, and an input; `convert` asks for that order."""
    layer, x = layer_of(kind)
    exact, model = nn.Sequential(layer, nn.GELU()), nn.Sequential(copy.deepcopy(layer), nn.GELU())
    hotrain.convert(model, memory="linear", filter_fn=lambda module, name: True)
    for net in (exact, model):
        torch.manual_seed(0)
        PARAMETRIZATIONS[way](net[0])
    return exact, model, x


@pytest.mark.parametrize("way", PARAMETRIZATIONS)
@pytest.mark.parametrize("kind", ["linear", "conv1d", "3x3"])
def test_a_parametrization_runs_once_in_a_forward(kind: str, way: str) -> None:
    """Each read is a power iteration or a draw: in first and later steps, of another shape, without gradients."""
    exact, model, x = parametrized_pair(kind, way)
    for grad, x_t in ((True, x), (True, x), (True, x[:1]), (False, x)):
        found = []
        for net in (exact, model):
            torch.manual_seed(1)
            with torch.set_grad_enabled(grad):
                found.append([net(x_t), torch.rand(()), *net.state_dict().values()])
        for want, got in zip(*found, strict=True):
            assert torch.equal(got, want)
    assert next(hotrain.converted_layers(model))[2].calls > 0


def test_compiled_a_parametrization_runs_once_too() -> None:
    """Spectral norm's buffers say how often it ran."""
    exact, model, x = parametrized_pair("linear", "spectral norm")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled(x), exact(x))
        for got, want in zip(model.buffers(), exact.buffers(), strict=True):
            assert torch.equal(got, want)


def test_dtypes_that_do_not_match_are_refused_as_pytorch_refuses_them() -> None:
    """A silent cast would train where evaluation raises. The error says in which layer, as PyTorch's does not."""
    model = nn.Sequential(nn.Linear(33, 45))
    hotrain.convert(model, "hot")
    with pytest.raises(RuntimeError, match="dtype") as raised:
        model(torch.randn(3, 37, 33, dtype=torch.bfloat16))
    said = "hotrain: in layer '0': input torch.bfloat16 (3, 37, 33), weight torch.float32 (45, 33)"
    assert raised.value.__notes__ == [said]


def test_images_smaller_than_the_kernel_are_refused_as_pytorch_refuses_them() -> None:
    model = nn.Sequential(nn.Conv2d(16, 32, 5))
    hotrain.convert(model, "hot", filter_fn=lambda *_: True)
    with pytest.raises(RuntimeError, match="Kernel size") as raised:
        model(torch.randn(8, 16, 3, 3))
    said = "hotrain: in layer '0': input torch.float32 (8, 16, 3, 3), weight torch.float32 (32, 16, 5, 5)"
    assert raised.value.__notes__ == [said]


@settings(max_examples=25, deadline=None)
@given(
    lead=st.lists(st.integers(0, 5), max_size=4),
    inputs=st.integers(1, 40),
    outputs=st.integers(1, 40),
    method=st.sampled_from(["hot-unbiased", "hla", "lbp-wht", "luq", "hq4"]),
)
def test_linear_of_any_shape(lead: list[int], inputs: int, outputs: int, method: str) -> None:
    """Any rank and any width, empty axes too: the same bits forward, and gradients of the right shape backward."""
    layer, x = nn.Linear(inputs, outputs), torch.randn(*lead, inputs, requires_grad=True)
    exact = copy.deepcopy(layer)
    hotrain.convert(layer, method, filter_fn=lambda module, name: True)
    y = layer(x)
    assert torch.equal(y, exact(x))
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert layer.weight.grad is not None
    assert layer.weight.grad.isfinite().all()

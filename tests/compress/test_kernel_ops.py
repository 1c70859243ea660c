"""What a compiler is told of an operator's results, and what they are, for inputs in every memory layout."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import hotrain
from hotrain.compress.operators import base

KERNELS = torch.ops.hotrain
IMAGE = (2, 16, 6, 4)


def layouts(*shape: int) -> Iterator[Tensor]:
    """Tensors of that shape: with their axes in each order of memory, a slice of each axis, and an expanded one."""
    for order in itertools.permutations(range(len(shape))):
        yield torch.randn([shape[axis] for axis in order]).permute([order.index(axis) for axis in range(len(shape))])
    yield torch.randn([2 * size for size in shape])[tuple(slice(0, 2 * size, 2) for size in shape)]
    yield torch.randn(1, *shape[1:]).expand(shape)


def _promised(operator: Any, args: Sequence[Any]) -> list[Tensor]:
    with FakeTensorMode() as mode:
        found = operator(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
    return [found] if isinstance(found, Tensor) else list(found)


def _as_promised(operator: Any, *args: Any) -> list[Tensor]:
    found = operator(*args)
    found = [found] if isinstance(found, Tensor) else list(found)
    for real, fake in zip(found, _promised(operator, args), strict=True):
        assert (real.shape, real.dtype) == (fake.shape, fake.dtype)
        assert not real.numel() or real.stride() == fake.stride(), (
            f"of {[a.stride() for a in args if isinstance(a, Tensor)]}"
        )
    return found


@pytest.mark.parametrize("form", ["int4 nearest", "int8"])
def test_codes(form: str) -> None:
    for t in layouts(4, 6, 32):
        _as_promised(KERNELS.keep_codes, t, form)


@pytest.mark.parametrize("name", ["gelu", "silu", "hardswish"])
def test_functions(name: str) -> None:
    """Of contiguous tensors alone: of others their caller makes none."""
    for shape in ((8, 32), (4, 6, 32), IMAGE):
        for bias in (None, torch.randn(shape[-1])):
            _as_promised(KERNELS.activate, torch.randn(shape), name, "int8", bias)


@pytest.mark.parametrize("name", ["", "relu", "silu"])
@pytest.mark.parametrize("channels", [16, 24])
def test_batch_norm(channels: int, name: str) -> None:
    """Results in channels-last, whatever comes in."""
    mean, r, w, b = (torch.rand(channels) for _ in range(4))
    shape = (2, channels, 6, 4)
    x = torch.randn(shape).contiguous(memory_format=torch.channels_last)
    for shortcut in (None, *layouts(*shape)):
        _, *kept = _as_promised(KERNELS.normalize, x, mean, r, w, b, shortcut, name)
    for t in layouts(*shape):
        _as_promised(KERNELS.normalize, t, mean, r, w, b, None, name)
        for passes_on in (False, True):
            for other in (None, t):
                _as_promised(KERNELS.norm_gradient, t, other, *kept, r, w, name, passes_on)
        _as_promised(KERNELS.normalize, t, mean, r, w, b, None, name, torch.bfloat16)
        wide = t.float()
        _as_promised(KERNELS.norm_gradient, t.bfloat16(), None, *kept, r, w, name, False, torch.float32, wide)


class _Turned(nn.Module):
    """Batch norm behind a transposition, of which PyTorch returns another layout than it tells a tracer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(48)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(x.transpose(1, 2))).mean(-1)


class _Written(nn.Module):
    """A product of matrices that is written to."""

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ x.mT) @ x
        y[..., :4] *= 2
        return y


@pytest.mark.parametrize("kind", [_Turned, _Written])
def test_compiled_without_decompositions(kind: type[nn.Module]) -> None:
    """As compiled by a backend that runs PyTorch's own operators: the result of eager mode, and a gradient."""
    torch._dynamo.reset()
    model, x = kind(), torch.randn(4, 36, 48, requires_grad=True)
    hotrain.convert(model, "exact", memory="block")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "SMALL", 100)
        want = model(x)
        got = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
        got.sum().backward()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert x.grad is not None

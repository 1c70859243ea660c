"""Compiled, what activations save: the bits of a ReLU where its result is rounded, none where that is saved, and no
codes behind an exact norm."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_memory_layout import Seen
from torch import Tensor, nn
from torch.nn import functional as F

import hotrain
from hotrain import geometry
from hotrain.compress import compiled
from hotrain.compress.operators import batch_norm, group_norm, image_norm

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "in place": lambda x: F.relu(x.clone(), inplace=True),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "of a transposed tensor": lambda x: F.relu(x.mT).mT,
}
READERS = {
    "conv1d": (lambda: nn.Conv1d(16, 8, 3), (16, 512)),
    "conv3d": (lambda: nn.Conv3d(16, 8, 3), (16, 8, 8, 8)),
    "in channels_last": (lambda: nn.ConvTranspose2d(16, 8, 3), (16, 16, 32)),
}


class Read(nn.Module):
    """A function whose result is read by a layer that has no operator: a compiled graph saves it itself."""

    def __init__(self, f: Callable[[Tensor], Tensor], reader: nn.Module) -> None:
        super().__init__()
        self.f, self.reader = f, reader

    def forward(self, x: Tensor) -> Tensor:
        return self.reader(self.f(x))  # type: ignore[no-any-return]


def steps(name: str, reader: str) -> tuple[list[Tensor], list[Tensor], Seen]:
    """Gradients of x and of the weight, compiled and exact, and what was compiled."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    make, shape = READERS[reader]
    exact = Read(FUNCTIONS[name], make())
    model, seen, x = copy.deepcopy(exact), Seen(), torch.randn(8, *shape)
    x[0, 0] *= 1e-4  # rounded to zero by the codes of the result
    x[1].view(-1)[:2] = torch.tensor([float("nan"), float("inf")])
    if reader == "in channels_last":
        x = x.to(memory_format=torch.channels_last)
    hotrain.convert(model, "exact", memory="block")
    found = []
    for run in (torch.compile(model, backend=seen.backend, fullgraph=True), exact):
        given = x.clone().requires_grad_()
        y: Any = run(given)
        (y * torch.linspace(0.5, 1.5, y[0].numel()).view(y[0].shape)).sum().backward()
        assert given.grad is not None
        found.append([given.grad, run.reader.weight.grad])
    return *found, seen  # type: ignore[return-value]


def packed(seen: Seen) -> int:
    """Tensors of bytes that forward returns, and operators that unpack."""
    results = [n.meta["val"] for n in seen.graphs[0].output_node().args[0] if hasattr(n, "meta") and "val" in n.meta]
    unpacked = seen.graphs[1].find_nodes(op="call_function", target=torch.ops.prims.bitwise_not.default)
    return sum(isinstance(t, Tensor) and t.dtype == torch.uint8 for t in results) + len(unpacked)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ["relu", "in place", "leaky_relu"])
def test_they_are_read_off_a_result_that_is_saved(name: str, reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph of exact training: the bits beside the result took 1.07 of its time in a network of `Conv1d`."""
    monkeypatch.setattr(compiled, "_choose", lambda gm: 0.0)  # a step that has no time for codes
    got, want, seen = steps(name, reader)
    assert packed(seen) == 0
    for mine, theirs in zip(got, want, strict=True):  # the same formulas: rounding of sums in float32 alone
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_they_are_saved_where_the_result_is_rounded(name: str, reader: str) -> None:
    """Of a result in int8 small entries are zero: theirs would be closed."""
    got, want, seen = steps(name, reader)
    assert packed(seen) >= 2
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-4, equal_nan=True)


BEHIND = {
    "group norm": (lambda: nn.GroupNorm(4, 16), (16, 16, 32), F.silu),
    "batch norm": (lambda: nn.BatchNorm1d(16), (16, 512), F.gelu),
}


@pytest.mark.parametrize("name", BEHIND)
def test_an_activation_behind_an_exact_norm_saves_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As exact training: backward makes its input of the norm's, which is saved. Codes of it would be saved besides."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    make, shape, f = BEHIND[name]
    reader = nn.Conv1d(16, 8, 3) if len(shape) == 2 else nn.ConvTranspose2d(16, 8, 3)
    exact = nn.Sequential(make(), Read(f, reader))
    model, seen, x = copy.deepcopy(exact), Seen(), torch.randn(8, *shape)
    x = x.to(memory_format=torch.channels_last) if len(shape) == 3 else x
    report = hotrain.convert(model, "exact", memory="block")
    assert report.buffers is not None
    report.buffers.must_not_lose = True
    for module in (image_norm, batch_norm):
        monkeypatch.setattr(module, "supported", lambda *_: True)
        monkeypatch.setattr(module, "is_fused", lambda *_: False)
    monkeypatch.setattr(geometry, "LAID_OUT", geometry.LAID_OUT | {"cpu"})
    monkeypatch.setattr(group_norm, "LAID_OUT", geometry.LAID_OUT)
    monkeypatch.setattr(compiled, "_choose", lambda gm: 0.0)
    found = []
    for run in (torch.compile(model, backend=seen.backend, fullgraph=True), exact):
        given = x.clone().requires_grad_()
        y: Any = run(given)
        (y * torch.linspace(0.5, 1.5, y[0].numel()).view(y[0].shape)).sum().backward()
        found.append(given.grad)
    assert packed(seen) == 0
    assert {"silu", "gelu"} & report.buffers.full.keys()
    assert (found[0] - found[1]).norm() <= 2.0**-8 * found[1].norm()  # what is saved is in bfloat16

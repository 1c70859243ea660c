"""A user's default device changes nothing: what hotrain makes names the device it belongs on.

The default device is meta here: a tensor made there has no data and mixes with none that has some, so that what names
no device raises. On GPUs it is cuda, as in `examples/distributed.py`.
"""

from __future__ import annotations

import ast
import functools
import gc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import ConvNet
from torch import Tensor, nn
from torch.nn import functional as F

import hotrain
from hotrain.transform.tokens import Grid, Recent, layout

SOURCE = Path(hotrain.__file__).parent
# What PyTorch makes on the default device where the call names none.
FACTORIES = """arange as_tensor asarray empty empty_permuted empty_strided eye full linspace logspace ones rand randint
randn randperm range scalar_tensor sparse_coo_tensor tensor tril_indices triu_indices zeros"""


class Attention(nn.Module):
    """One head, written as most models do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        return self.proj(F.scaled_dot_product_attention(q, k, v).squeeze(1))


class OwnRMSNorm(nn.Module):
    """Written out by hand: `compress.operators.norm.composed` tries it on random numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        normal = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normal.to(x.dtype)


class FastGELUActivation(nn.Module):
    """As transformers writes it out: `compress.interpose` tries it on a few numbers."""

    __module__ = "transformers.activations"

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm2, self.up, self.down = OwnRMSNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.act, self.plain = FastGELUActivation(), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.plain(self.down(self.act(self.up(self.norm2(x)))))


def linear() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32)), torch.randn(2, 27, 32)


def convolutions() -> tuple[nn.Module, Tensor]:
    """3×3 and 1×1."""
    return ConvNet(), torch.randn(2, 32, 6, 6)


def blocks() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(Block(32), Block(32)), torch.randn(2, 19, 32)


def forget() -> None:
    """Empty hotrain's caches, so that what they hold is made anew."""
    for kept in gc.get_objects():
        if type(kept) is Recent or (
            type(kept) is functools._lru_cache_wrapper and kept.__module__.startswith("hotrain.")
        ):
            kept.cache_clear()


def same(run: Callable[[], list[Any]]) -> None:
    """`run` gives the same with a default device and without, from empty caches and from those the other filled."""
    forget()
    want = run()
    for fresh, default in ((False, "meta"), (True, "meta"), (False, None)):
        if fresh:
            forget()
        with torch.device(default) if default else nullcontext():
            got = run()
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b) if isinstance(b, Tensor) else a == b, (fresh, default)


def step(make: Callable[[], tuple[nn.Module, Tensor]], method: str, backend: str = "", **options: Any) -> list[Any]:
    """Output, gradients, kept bytes and report of a step. Model and input are made on the CPU, the rest by hotrain."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    hotrain.manual_seed(0)
    with torch.device("cpu"):
        net, x = make()
    report = hotrain.convert(net, method, **{"filter_fn": lambda module, name: True, "plan": "memory"} | options)
    y = (torch.compile(net, backend=backend) if backend else net)(x.requires_grad_())
    y.square().mean().backward()
    kept = hotrain.saved_bytes(net, x)
    return [y.detach(), x.grad, *(p.grad for p in net.parameters()), kept.total, str(kept), str(report)]


def test_every_tensor_names_its_device() -> None:
    """Also those that only a GPU makes."""
    unnamed = [
        f"{file.relative_to(SOURCE)}:{call.lineno}: {ast.unparse(call)}"
        for file in SOURCE.rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) in {f"torch.{name}" for name in FACTORIES.split()}
        and "device" not in [keyword.arg for keyword in call.keywords]
    ]
    assert unnamed == []


@pytest.mark.parametrize("make", [linear, convolutions])
@pytest.mark.parametrize(
    "method", ["hq8", "hot", "hot-unbiased", "hq4", "luq", "hla", "lbp-wht", "hot-importance", "int4", "dropout"]
)
def test_a_step_is_the_same(make: Callable[[], tuple[nn.Module, Tensor]], method: str) -> None:
    same(lambda: step(make, method, memory="linear"))


@pytest.mark.parametrize("method", ["exact", "hq8", "hot-unbiased"])
def test_a_step_with_compressed_blocks_is_the_same(method: str) -> None:
    same(lambda: step(blocks, method, memory="block"))


@pytest.mark.slow
def test_a_compiled_step_is_the_same() -> None:
    same(lambda: step(lambda: (Block(32), torch.randn(2, 19, 32)), "hot-unbiased", "aot_eager", memory="block"))


def test_set_default_device(request: pytest.FixtureRequest) -> None:
    """The other way to set it."""
    want = step(blocks, "hq8", memory="block")
    forget()
    request.addfinalizer(lambda: torch.set_default_device(None))
    torch.set_default_device("meta")
    got = step(blocks, "hq8", memory="block")
    torch.set_default_device(None)
    assert all(torch.equal(a, b) if isinstance(b, Tensor) else a == b for a, b in zip(got, want, strict=True))


def loss(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().mean()


@pytest.mark.parametrize(
    ("method", "measure"),
    [
        ("int4", lambda net, x: hotrain.calibrate(net, [x], loss).layers),
        ("hot-unbiased", lambda net, x: hotrain.calibrate_ranks(net, [x], loss).layers),
        ("hot-unbiased", lambda net, x: hotrain.fidelity(net, x, loss, draws=2).rows),
        ("hq8", lambda net, x: hotrain.predicted_bytes(net, x).total),
    ],
    ids=["calibrate", "calibrate_ranks", "fidelity", "predicted_bytes"],
)
def test_what_is_measured_is_the_same(method: str, measure: Callable[[nn.Module, Tensor], Any]) -> None:
    def run() -> list[Any]:
        torch.manual_seed(0)
        hotrain.manual_seed(0)
        with torch.device("cpu"):
            net, x = linear()
        hotrain.convert(net, method, filter_fn=lambda *_: True, plan="memory")
        return [measure(net, x)]

    same(run)


class Positions(nn.Module):
    """Makes its positions on the default device, where its weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc = nn.Embedding(16, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x + self.table(torch.arange(x.shape[1])))


def test_bytes_are_predicted_where_the_model_uses_the_default_device() -> None:
    """A prediction has everything on the CPU, what the model makes too: tensors without data need no GPU for cuda."""
    net, x = Positions(), torch.empty(2, 16, 32)
    hotrain.convert(net, "hq8", filter_fn=lambda *_: True, plan="memory")
    want = hotrain.predicted_bytes(net, x).total
    with torch.device("cuda"):
        assert hotrain.predicted_bytes(net, x).total == want


def test_the_places_of_a_kernels_slots() -> None:
    """Blocks of tiles with and without padding, of a grid with a class token, of dense tokens alone."""
    pytest.importorskip("triton")
    from hotrain.kernels.quantize_kernels import _index, natural_rows

    cases: list[Any] = [((2, 50), Grid(7, 7, 1)), ((3, 27), None), ((1, 7), None), ((2, 32), None)]

    def run() -> list[Any]:
        found: list[Any] = [natural_rows(19, torch.device("cpu"))]
        for lead, grid in cases:
            found += _index(layout(lead, 16, 8, 4, "auto", grid, True), 2, 16, torch.device("cpu"))
        return found

    same(run)

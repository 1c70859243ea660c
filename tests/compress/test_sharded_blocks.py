"""FSDP2's hooks and compiled blocks run without the mode of the whole model, and compress the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import hotrain
from hotrain.compress import interpose


class Block(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.down(F.gelu(self.up(self.norm(x) if self.first else x)))
        return y if self.first else self.norm(y)


class Model(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(first), Block(first)])
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def converted(first: bool = True) -> tuple[Model, hotrain.ConversionReport]:
    model = Model(first).train()
    report = hotrain.convert(model, "exact", memory="block", plan="memory")
    return model, report


@pytest.fixture
def alone(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(model: Model) -> None:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)


def calls_of_the_models_mode(model: Model, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> int:
    """Calls of a mode outside of the forwards of blocks."""
    inside, outside = [0], [0]
    plain = interpose.Compressed.__torch_function__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        outside[0] += not inside[0] and not torch.compiler.is_compiling()
        return plain(self, *args, **kwargs)

    def entered(module: nn.Module, change: int) -> None:
        inside[0] += change

    with monkeypatch.context() as patch:
        for block in model.blocks:
            block.register_forward_pre_hook(lambda m, _: entered(m, 1))
            block.register_forward_hook(lambda m, *_: entered(m, -1))
        patch.setattr(interpose.Compressed, "__torch_function__", counted)
        model(x)
    return outside[0]


@pytest.mark.usefixtures("alone")
def test_hooks_of_fsdp2_call_no_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """They read hundreds of attributes of tensors, and each would be a call: there are as many calls outside of the
    blocks as without FSDP2, those of the norm behind them."""
    x = torch.randn(4, 64, 64)
    model, _ = converted()
    want = calls_of_the_models_mode(model, x, monkeypatch)
    sharded(model)
    assert calls_of_the_models_mode(model, x, monkeypatch) == want > 0


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("first", [True, False], ids=["pre-norm", "post-norm"])
def test_gradients_and_saved_formats_are_those_of_one_process(first: bool) -> None:
    """To the bit, also where a block's layer shares what the block before it has made (post-norm)."""
    x = torch.randn(4, 64, 64)
    found = []
    for way in (lambda _: None, sharded):
        model, report = converted(first)
        way(model)
        model(x).square().mean().backward()
        grads = [p.grad for p in model.parameters()]
        whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]  # type: ignore[union-attr]
        found.append((whole, str(report.buffers)))
    assert found[0][1] == found[1][1]
    for got, want in zip(found[1][0], found[0][0], strict=True):
        assert torch.equal(got, want)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's, of the second block's input
@pytest.mark.parametrize("in_place", [True, False], ids=["Module.compile", "torch.compile"])
def test_compiled_blocks_call_no_mode(in_place: bool) -> None:
    """What the compiler made calls operators at every step; each would be a call. The blocks' own mode is in it.
    `torch.compile` returns another module, which replaces the block (accelerate compiles regions so)."""
    model, x, found = Model(first=True).train(), torch.randn(4, 64, 64), []
    hotrain.convert(model, "exact", memory="block", plan="memory")
    for number, block in enumerate(model.blocks):
        if in_place:
            block.compile(backend="aot_eager")
        else:
            model.blocks[number] = torch.compile(block, backend="aot_eager")
    for blocks in (model.blocks, nn.ModuleList()):  # and the norm behind them alone
        model.blocks = blocks
        model(x)
        found.append(calls_of_modes(model, x))
    assert found[0] == found[1] > 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_regions_of_accelerate_call_no_mode() -> None:
    """It returns a copy of the model, whose blocks and norms it has compiled."""
    utils = pytest.importorskip("accelerate.utils")
    model, x = Model(first=True).train(), torch.randn(4, 64, 64)
    report = hotrain.convert(model, "exact", memory="block", plan="memory")
    regions = utils.compile_regions(model, backend="aot_eager")
    regions(x)
    assert calls_of_modes(regions, x) == 0 < calls_of_modes(model, x)
    assert "layer_norm" in str(report.buffers)


def test_a_method_of_a_class_that_is_named_compile_is_left_alone() -> None:
    """As Keras's, which takes an optimizer: it compiles no forward, and what it returns is returned."""

    class Own(Model):
        def compile(self, optimizer: str) -> str:  # type: ignore[override]
            return f"with {optimizer}"

    model = Own(first=True).train()
    hotrain.convert(model, "exact", memory="block", plan="memory")
    assert model.compile("adam") == "with adam"
    assert model._compiled_call_impl is None


def calls_of_modes(model: nn.Module, x: Tensor) -> int:
    codes = []
    sys.setprofile(lambda frame, event, _: codes.append(frame.f_code) if event == "call" else None)
    try:
        model(x)
    finally:
        sys.setprofile(None)
    return codes.count(interpose.Compressed.__torch_function__.__code__)

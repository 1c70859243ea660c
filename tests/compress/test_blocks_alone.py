"""Sharded blocks have a mode each; the model's own is not entered around FSDP2's hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import hotrain
from hotrain.compress import interpose


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def converted() -> tuple[Model, hotrain.ConversionReport]:
    model = Model().train()
    report = hotrain.convert(model, "exact", memory="block", plan="memory")
    return model, report


@pytest.fixture
def alone(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def as_it_is(model: Model) -> None:
    pass


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
@pytest.mark.parametrize(("way", "spared"), [(as_it_is, False), (sharded, True)])
def test_the_models_mode_is_not_entered(
    way: Callable[[Model], None], spared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP2's hooks read hundreds of attributes of tensors, and each would be a call of the mode."""
    model, report = converted()
    way(model)
    calls = calls_of_the_models_mode(model, torch.randn(4, 64, 64), monkeypatch)
    assert (calls == 0) == spared
    assert ("outside of the blocks" in str(report)) == spared


@pytest.mark.usefixtures("alone")
def test_gradients_are_those_of_the_blocks_alone() -> None:
    """To the bit: blocks compress as they do by themselves, and the norm behind them is exact."""
    x = torch.randn(4, 64, 64)
    model, _ = converted()
    sharded(model)
    model(x).square().mean().backward()
    twin = Model().train()
    for block in twin.blocks:
        hotrain.convert(block, "exact", memory="block", plan="memory")
    twin(x).square().mean().backward()
    for got, want in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(got.grad.full_tensor(), want.grad)  # type: ignore[union-attr,arg-type]


def test_a_copy_has_its_own_blocks_and_revert_forgets_them() -> None:
    model, _ = converted()
    twin = copy.deepcopy(model)
    assert twin.__dict__[interpose._BLOCKS] == tuple(twin.blocks)
    hotrain.revert(twin)
    assert interpose._BLOCKS not in twin.__dict__
    assert model.__dict__[interpose._BLOCKS] == tuple(model.blocks)

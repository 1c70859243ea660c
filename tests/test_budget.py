"""Blocks that recompute: the same gradients, fewer bytes, as many as a budget asks for, and back again."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotrain
from hotrain.compress.checkpointing import Recomputed, blocks, keep_all, recompute


class Block(nn.Module):
    """Residual, with all that a recomputation could get wrong: dropout, running statistics, a converted layer."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.batch = nn.LayerNorm(width), nn.BatchNorm1d(width)
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, scale: float = 1.0, past_key_values: Any = None) -> Tensor:
        y = self.fc2(nn.functional.gelu(self.fc1(self.norm(x))))
        return x + scale * self.drop(self.batch(y.transpose(1, 2)).transpose(1, 2))


class Net(nn.Module):
    """The third block keeps far more than the others."""

    def __init__(self, inner: tuple[int, ...] = (64, 64, 256)) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(32, 64), nn.Linear(64, 4)
        self.blocks = nn.ModuleList(Block(64, width) for width in inner)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x.mean(1))


X = torch.randn(8, 64, 32, generator=torch.Generator().manual_seed(0))
CONVERSIONS: dict[str, Callable[[nn.Module], object]] = {
    "exact": lambda model: None,
    "linear": lambda model: hotrain.convert(model, memory="linear"),
    "block": lambda model: hotrain.convert(model, memory="block"),
}


def two_steps(model: nn.Module, call: Callable[[Tensor], Tensor] | None = None) -> dict[str, Tensor]:
    """Gradients of two steps and the buffers after them."""
    hotrain.manual_seed(1)
    torch.manual_seed(1)
    model.zero_grad()
    for _ in range(2):
        (model if call is None else call)(X).square().sum().backward()
    found = {f"grad.{name}": p.grad.clone() for name, p in model.named_parameters()}
    return found | {name: b.clone() for name, b in model.named_buffers()}


@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("first", ["convert", "recompute"])
def test_gradients_and_statistics_are_those_without(conversion: str, first: str) -> None:
    """To the bit, whatever was put on the blocks first: draws, dropout masks and codes are those of the first forward,
    and running statistics count a batch once."""
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    CONVERSIONS[conversion](twin)
    for change in (CONVERSIONS[conversion], lambda m: recompute(blocks(m)))[:: 1 if first == "convert" else -1]:
        change(model)
    want, got = two_steps(twin), two_steps(model)
    assert all(isinstance(block, Recomputed) for block in model.blocks)
    assert [name for name in want if not torch.equal(want[name], got[name])] == []


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_compiled_whole_as_in_eager(conversion: str) -> None:
    """fullgraph: no graph break. Without dropout, whose masks a compiler draws on its own, gradients agree up to the
    order of float32 sums; where codes are kept, a sum on the other side of a rounding moves a code by one."""
    torch.manual_seed(0)
    model = Net((64, 64))
    for block in model.blocks:
        block.drop.p = 0.0
    CONVERSIONS[conversion](model)
    plain = two_steps(copy.deepcopy(model))
    hotrain.checkpoint_blocks(model)
    torch._dynamo.reset()
    # The memory of recomputing needs the partitioner alone, not a C++ compiler.
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition")
    got = two_steps(model, compiled)
    largest = max(want.float().norm() for want in plain.values())  # a bias before a norm has a gradient of zero
    for name, want in plain.items():
        error = (got[name].float() - want.float()).norm() / largest
        assert error < (1e-5 if conversion == "exact" else 0.02), name
    kept = hotrain.saved_bytes(compiled, X).total
    keep_all(model)
    torch._dynamo.reset()
    if conversion == "exact":
        whole = torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition")
        assert kept < hotrain.saved_bytes(whole, X).total / 2


def test_a_budget_takes_as_many_as_it_needs() -> None:
    model = Net((64, 64, 64))
    before = hotrain.saved_bytes(model, X).total
    assert hotrain.checkpoint_blocks(model, X, budget_bytes=before).recomputed == []
    one = hotrain.checkpoint_blocks(model, X, budget_bytes=before - 1)
    assert len(one.recomputed) == 1
    assert one.after == hotrain.saved_bytes(model, X).total < before == one.before
    assert "1 of 3 blocks recompute" in str(one)
    more = hotrain.checkpoint_blocks(model, X, budget_bytes=one.after - 1)  # it decides anew
    assert len(more.recomputed) == 2
    assert set(more.recomputed) | set(more.kept) == {"blocks.0", "blocks.1", "blocks.2"}
    assert [isinstance(block, Recomputed) for block in model.blocks] == [
        name in more.recomputed for name in ("blocks.0", "blocks.1", "blocks.2")
    ]


def test_what_frees_most_for_its_time_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from hotrain import budget

    model = Net()
    before = hotrain.saved_bytes(model, X).total
    monkeypatch.setattr(budget, "_seconds", lambda model, modules, *_: dict.fromkeys(modules, 1.0))
    assert hotrain.checkpoint_blocks(model, X, budget_bytes=before - 1).recomputed == ["blocks.2"]
    slow = {"blocks.0": 1.0, "blocks.1": 1.0, "blocks.2": 100.0}
    monkeypatch.setattr(budget, "_seconds", lambda *_: slow)
    assert hotrain.checkpoint_blocks(model, X, budget_bytes=before - 1).recomputed == ["blocks.0"]


def test_a_small_block_is_let_go_where_a_large_one_was_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    from hotrain import budget

    model = Net()
    least = hotrain.saved_bytes(model, X).total
    fast_small = {"blocks.0": 1.0, "blocks.1": 100.0, "blocks.2": 50.0}
    monkeypatch.setattr(budget, "_seconds", lambda *_: fast_small)
    recompute({"blocks.2": model.blocks[2]})
    enough = hotrain.saved_bytes(model, X).total
    assert enough < least
    assert hotrain.checkpoint_blocks(model, X, budget_bytes=enough).recomputed == ["blocks.2"]


def test_compressed_and_recomputed() -> None:
    """A block that keeps less in codes than its inputs are is not worth recomputing; a wide one is."""
    model = Net((64, 64, 1024))
    hotrain.convert(model, memory="block")
    before = hotrain.saved_bytes(model, X).total
    report = hotrain.checkpoint_blocks(model, X, budget_bytes=before - 1)
    assert report.recomputed == ["blocks.2"]
    assert report.after < before


def test_a_budget_that_cannot_be_met_names_the_least() -> None:
    model = Net()
    hotrain.checkpoint_blocks(model, X, budget_bytes=hotrain.saved_bytes(model, X).total - 1)
    before = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match="cannot be met") as caught:
        hotrain.checkpoint_blocks(model, X, budget_bytes=1000)
    assert [type(m) for m in model.modules()] == before, "as it was"
    least = int(re.search(r"and (\d+) ", str(caught.value))[1])
    assert hotrain.checkpoint_blocks(model, X, budget_bytes=least).after == least
    with pytest.raises(ValueError, match="cannot be met"):
        hotrain.checkpoint_blocks(model, X, budget_bytes=least - 1)
    with pytest.raises(ValueError, match="budget_bytes=1024 "):
        hotrain.checkpoint_blocks(model, X, budget_bytes="1KiB")  # a size, as the frontier takes it


class Heads(nn.Module):
    """Two blocks read one tensor, whose codes they share: recomputed, both need it whole."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(16, 64, 1)
        self.heads = nn.ModuleList(nn.Sequential(nn.Conv2d(64, 64, 1), nn.ReLU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return sum(head(x).sum() for head in self.heads)


def test_recomputing_that_keeps_more_is_no_least() -> None:
    """Of a detector's heads, kept in codes, recomputing all keeps their input whole: the least is below that."""
    model, x = Heads(), torch.randn(4, 16, 32, 32)
    hotrain.convert(model, filter_fn=lambda *_: True)
    full = hotrain.saved_bytes(model, x).total
    hotrain.checkpoint_blocks(model)
    assert hotrain.saved_bytes(model, x).total > full, "or the case shows nothing"
    with pytest.raises(ValueError, match="cannot be met") as caught:
        hotrain.checkpoint_blocks(model, x, budget_bytes=full // 2)
    assert int(re.search(r"and (\d+) ", str(caught.value))[1]) <= full


def test_bad_calls() -> None:
    with pytest.raises(ValueError, match="no blocks"):
        hotrain.checkpoint_blocks(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="inputs"):
        hotrain.checkpoint_blocks(Net(), budget_bytes=1000)
    with pytest.raises(ValueError, match="budget_bytes=-1"):
        hotrain.checkpoint_blocks(Net(), X, budget_bytes=-1)
    with pytest.raises(ValueError, match="got 'much', accepted are sizes as 24GB"):
        hotrain.checkpoint_blocks(Net(), X, budget_bytes="much")
    model = Net()
    hotrain.checkpoint_blocks(model)
    with pytest.raises(ValueError, match="use_cache=False"):
        model.blocks[0](torch.randn(2, 4, 64), past_key_values=object())


class Opaque(Net):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args)


@pytest.mark.parametrize(
    ("model", "inputs", "options", "message"),
    [
        # a budget by another name would recompute every block and say nothing
        (Net, (X,), {"budget": "1GiB"}, r"got budget='1GiB'; accepted are budget_bytes .*Net\.forward \(x\)"),
        (Net, (X,), {"budget": 8, "budget_bytes": "1GiB"}, r"got budget=8; accepted are budget_bytes"),
        (Opaque, (X,), {"budget": "1GiB"}, r"\(…\), which without budget_bytes nothing calls: leave budget out"),
        (Net, ("1GiB",), {}, r"got '1GiB' as an input .*budget_bytes='1GiB'"),  # without its name
    ],
    ids=["typo", "typo beside it", "any keyword", "positional"],
)
def test_a_budget_by_another_name_is_refused(
    model: type[nn.Module], inputs: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    net = model()
    with pytest.raises(TypeError, match=f"checkpoint_blocks: .*{message}"):
        hotrain.checkpoint_blocks(net, *inputs, **options)
    assert not any(isinstance(block, Recomputed) for block in net.blocks)


def test_keywords_of_the_model_are_the_models() -> None:
    """With a budget all that its forward takes; without one those that it names, as a batch may be given by name."""
    assert len(hotrain.checkpoint_blocks(Net(), x=X).recomputed) == 3
    assert hotrain.checkpoint_blocks(Net(), x=X, budget_bytes="1GiB").recomputed == []
    assert hotrain.checkpoint_blocks(Opaque(), X, mask=None, budget_bytes="1GiB").recomputed == []


def test_revert_and_state_dict() -> None:
    model = Net()
    classes, keys = [type(m) for m in model.modules()], list(model.state_dict())
    hotrain.convert(model, memory="block")
    hotrain.checkpoint_blocks(model)
    assert list(model.state_dict()) == keys
    hotrain.revert(model)
    assert [type(m) for m in model.modules()] == classes
    hotrain.checkpoint_blocks(model)
    hotrain.convert(model, memory="block")
    hotrain.convert(model, memory="linear")  # takes the other mixin away, from under this one
    assert all(isinstance(block, Recomputed) for block in model.blocks)
    hotrain.revert(model)
    assert [type(m) for m in model.modules()] == classes


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_copy_recomputes_too(copied: Callable[[nn.Module], Net]) -> None:
    model = Net()
    hotrain.convert(model, memory="block")
    hotrain.checkpoint_blocks(model)
    twin = copied(model)
    assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
    assert hotrain.saved_bytes(twin, X).total == hotrain.saved_bytes(model, X).total


def test_blocks_are_the_innermost() -> None:
    inner = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    model = nn.ModuleDict({"stages": nn.ModuleList([nn.ModuleDict({"parts": inner}), nn.Linear(4, 4)])})
    assert list(blocks(model)) == ["stages.0.parts.0"]

"""Together with checkpointing, processes, adapters, accumulation, copies, and taken back again."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from operator_cases import nbytes, saving
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from two_processes import found_by_each

import hotrain
from hotrain import products
from hotrain.compress import interpose
from hotrain.compress.checkpointing import keep_all, recompute
from hotrain.compress.mixins import Mixin

pytestmark = pytest.mark.usefixtures("small_tensors_too")


class Block(nn.Module):
    """Pre-norm attention and MLP, with dropout."""

    def __init__(self, width: int = 32, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        x = x + self.drop(self.proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        return x + self.drop(self.fc2(nn.functional.gelu(self.fc1(self.norm2(x)))))


class Net(nn.Module):
    """Blocks in a list; how: None, or what a block is called through."""

    def __init__(self, how: Callable[..., Tensor] | None = None, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(2))
        self.norm, self.how = nn.LayerNorm(32), how

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.how is None else self.how(block, x)
        return self.norm(x) * scale


def batch(count: int = 2) -> Tensor:
    return torch.randn(count, 17, 32, generator=torch.Generator().manual_seed(3))


def loss(y: Tensor) -> Tensor:
    """One that a norm's output does not make nearly constant."""
    return (y * torch.randn(y.shape[1:], generator=torch.Generator().manual_seed(5))).sum()


def step(model: nn.Module, x: Tensor | None = None) -> list[Tensor]:
    """Gradients of one step from the same state of the generators."""
    torch.manual_seed(1)
    hotrain.manual_seed(1)
    model.zero_grad()
    loss(model(batch() if x is None else x)).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def converted(method: str = "hot-unbiased", **options: Any) -> Net:
    net = Net(**options)
    hotrain.convert(net, method, memory="block")
    return net


def _selective(block: nn.Module, x: Tensor) -> Tensor:
    """Products are saved, all else is computed again."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    context = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(block, x, use_reentrant=False, context_fn=context)


CHECKPOINTS: dict[str, Callable[..., Tensor]] = {
    "reentrant": lambda block, x: checkpoint(block, x.requires_grad_() if x.is_leaf else x, use_reentrant=True),
    "non-reentrant": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "non-reentrant, of a method": lambda block, x: checkpoint(block.forward, x, use_reentrant=False),
    "selective": _selective,
}


@pytest.mark.parametrize("how", CHECKPOINTS)
@pytest.mark.parametrize("method", ["exact", "hot-unbiased"])
def test_checkpointed_blocks_have_the_same_gradients(how: str, method: str) -> None:
    """To the bit: the second forward runs under the mode again, draws the same dropout and makes the same codes."""
    want, got = step(converted(method)), step(converted(method, how=CHECKPOINTS[how]))
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_a_checkpoint_around_the_model() -> None:
    net = converted()
    want = step(net)
    assert all(torch.equal(g, w) for g, w in zip(step(Around(net)), want, strict=True))


def _images() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 1), nn.GroupNorm(4, 32)
    )


SUBJECTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "tokens": (lambda: Net(dropout=0.0), (2, 17, 32)),
    "images": (_images, (2, 32, 9, 11)),
}


@pytest.mark.parametrize("method", ["hq8", "hot", "hot-unbiased"])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_exported_in_training_mode_it_is_exact_and_leaves_nothing_behind(subject: str, method: str) -> None:
    make, shape = SUBJECTS[subject]
    net, x = make(), torch.randn(shape, generator=torch.Generator().manual_seed(3))
    hotrain.convert(net, method, memory="block")
    want = step(net, x)
    again = torch.randn(shape[0] + 1, *shape[1:])
    for strict in (False, True):
        program = torch.export.export(net, (again,), strict=strict)
        assert not [n for n in program.graph.nodes if "hotrain" in str(n.target) or "bmm" in str(n.target)]
        torch.testing.assert_close(program.module()(again), make()(again))
        step(net, again)
        assert all(torch.equal(g, w) for g, w in zip(step(net, x), want, strict=True))


@pytest.mark.parametrize("method", ["hq8", "hot", "hot-unbiased"])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_step_of_fake_tensors(subject: str, method: str) -> None:
    """As memory estimators make them: it runs, gives the shapes, and the next real step is as if it had not been."""
    make, shape = SUBJECTS[subject]
    net = make()
    hotrain.convert(net, method, memory="block")
    want = step(net, torch.ones(shape))
    products.has_int8_units.cache_clear()
    with FakeTensorMode():
        fake = make()
        hotrain.convert(fake, method, memory="block")
        fake(torch.ones(shape)).sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in fake.parameters())
    assert all(torch.equal(g, w) for g, w in zip(step(net, torch.ones(shape)), want, strict=True))


def test_tracing_a_converted_model_with_fx_says_what_to_do() -> None:
    """In eval mode too, as torchvision's create_feature_extractor does."""
    net = Sum()
    hotrain.convert(net)
    for mode in (True, False):
        with pytest.raises(
            RuntimeError, match=r"hotrain: torch\.fx cannot trace.*before hotrain\.convert.*hotrain\.revert"
        ):
            torch.fx.symbolic_trace(net.train(mode))


def test_scripting_a_converted_model_says_what_to_do() -> None:
    net = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32))
    hotrain.convert(net)
    with pytest.raises(RuntimeError, match=r"hotrain: torch\.jit\.script.*hotrain\.revert"):
        torch.jit.script(net)
    hotrain.revert(net)
    torch.jit.script(net)


def test_scripted_modules_are_left_as_they_are() -> None:
    """What is around them is compressed, and the report says that they are not."""
    scripted = torch.jit.script(nn.Sequential(nn.Linear(32, 32), nn.ReLU()))
    net = nn.Sequential(nn.LayerNorm(32), scripted, nn.Linear(32, 32))
    report = hotrain.convert(net)
    assert [row.name for row in report.kept] == ["1"]  # once, not again for what is in it
    assert report.kept[0].reason.startswith("made by torch.jit")
    assert "modules of torch.jit.script" in str(report)
    with saving() as held:
        net(batch().requires_grad_()).sum().backward()
    assert any(t.dtype == torch.uint8 for t in held)
    assert net[1] is scripted
    hotrain.revert(net)
    assert type(net) is nn.Sequential


def test_where_a_norm_cannot_be_looked_at_nothing_is_converted_by_half(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(module: nn.Module) -> bool:
        raise KeyError("weight")

    net = Net()
    monkeypatch.setattr(interpose, "composed", fails)
    with pytest.raises(KeyError):
        interpose.wrap(net)
    assert type(net) is Net
    assert all(type(block) is Block for block in net.blocks)


class Around(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.net, x, use_reentrant=False)


class Inside(Block):
    """Checkpoints functions of its own, which no module's class is around when they are computed again."""

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self._mlp, super().forward(x), use_reentrant=False)

    def _mlp(self, x: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(self.norm2(x)))) * x


@pytest.mark.parametrize("method", ["exact", "hot-unbiased"])
def test_a_checkpointed_function_inside_a_block_is_left_to_the_checkpoint(method: str) -> None:
    """It keeps its input either way; compressed only at first, it would not find the second time what it kept."""
    net = Net(dropout=0.0)
    net.blocks[0] = Inside(dropout=0.0)
    plain = copy.deepcopy(net)
    hotrain.convert(net, method, memory="block")
    want = step(plain)
    for got, w in zip(step(net), want, strict=True):
        assert got.isfinite().all()
        if method == "exact":
            assert (got - w).norm() <= 0.3 * w.norm()


def test_a_checkpointed_block_keeps_its_input_alone() -> None:
    x = batch().requires_grad_()
    net = converted(how=CHECKPOINTS["non-reentrant"])
    net.norm = nn.Identity()  # type: ignore[assignment]
    with saving() as held:
        net(x)
    # x, the second block's input, and the scale 1.0 of the product
    assert nbytes(held, [*net.parameters(), *net.buffers()]) <= 2 * x.nbytes + 64


def test_gradients_accumulate() -> None:
    """Two halves of a batch, each with half of the loss: the sum of their gradients to float32's rounding."""
    net = converted("exact", dropout=0.0)
    halves = [step(net, half) for half in batch(4).split(2)]
    net.zero_grad()
    for half in batch(4).split(2):
        loss(net(half)).backward()
    for p, a, b in zip(net.parameters(), *halves, strict=True):
        torch.testing.assert_close(p.grad, a + b, rtol=1e-5, atol=1e-5)


def test_classes_keys_and_signatures_are_as_before() -> None:
    plain = Net()
    net = converted()
    assert list(net.state_dict()) == list(plain.state_dict())
    assert isinstance(net, Net)
    assert isinstance(net.blocks[0], Block)
    assert repr(net) == repr(converted())
    # transformers' Trainer looks up in it which columns the model takes
    assert inspect.signature(net.forward) == inspect.signature(plain.forward)
    assert inspect.signature(type(net).forward) == inspect.signature(Net.forward)
    hotrain.revert(net)
    for (name, before), (_, after) in zip(plain.named_modules(), net.named_modules(), strict=True):
        assert type(before) is type(after), name
        assert set(before.__dict__) == set(after.__dict__), name
    assert all(torch.equal(g, w) for g, w in zip(step(net), step(plain), strict=True))


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
def test_copies_are_compressed_too(way: str, tmp_path: Path) -> None:
    """By the codes they keep; the copy's own conversion can be taken back."""
    net = converted("exact")
    if way == "deepcopy":
        twin = copy.deepcopy(net)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(net))
    else:
        torch.save(net, tmp_path / "net.pt")
        twin = torch.load(tmp_path / "net.pt", weights_only=False)
    with saving() as held:
        twin(batch())
    assert any(t.dtype == torch.uint8 for t in held)
    assert all(torch.equal(g, w) for g, w in zip(step(twin), step(net), strict=True))
    hotrain.revert(twin)
    assert type(twin) is Net
    assert type(net) is not Net


class Sum(nn.Module):
    """What fx can trace, and pickle: without annotations, which are strings here."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.b(nn.functional.gelu(self.norm(self.a(x)))) + x


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_of_a_module_that_copies_itself(way: str) -> None:
    """fx.GraphModule makes a class for each instance, from the first class of its own that is not called as it is."""
    net = torch.fx.symbolic_trace(Sum())
    hotrain.convert(net, "exact", memory="block")
    x = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(3))
    want = step(net, x)
    for _ in range(2):  # a copy can be copied
        net = copy.deepcopy(net) if way == "deepcopy" else pickle.loads(pickle.dumps(net))
        assert all(torch.equal(g, w) for g, w in zip(step(net, x), want, strict=True))
        with saving() as held:
            net(x)
        assert any(t.dtype == torch.uint8 for t in held)
    hotrain.revert(net)
    assert type(net).__mro__[1] is torch.fx.GraphModule
    assert all(torch.equal(g, w) for g, w in zip(step(net, x), step(Sum(), x), strict=True))


def _keep_forward(net: Net) -> None:
    """As accelerate does under mixed precision: the bound forward, called by another on the instance."""
    bound = net.forward
    net.forward = lambda *args, **kwargs: bound(*args, **kwargs)  # type: ignore[method-assign]


@pytest.mark.parametrize("after", ["revert", "memory=linear", "revert and convert"])
def test_a_forward_that_was_kept_while_converted(after: str) -> None:
    net, plain = converted("hot-unbiased", how=_call, dropout=0.0), Net(dropout=0.0)
    for block in (net, *net.blocks):
        _keep_forward(block)
    if after == "memory=linear":
        hotrain.convert(net, "hot-unbiased", memory="linear")
        hotrain.convert(plain, "hot-unbiased", memory="linear")
    else:
        hotrain.revert(net)
        if after == "revert and convert":
            hotrain.convert(net, "hot-unbiased", memory="block")
            hotrain.convert(plain, "hot-unbiased", memory="block")
    assert all(torch.equal(g, w) for g, w in zip(step(net), step(plain), strict=True))
    assert torch.equal(net.eval()(batch()), plain.eval()(batch()))


def _call(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


@pytest.mark.parametrize("kind", ["norm", "function", "recomputed"])
def test_a_forward_of_another_mixin_that_was_kept(kind: str) -> None:
    module: nn.Module = {"norm": LlamaLikeRMSNorm, "function": nn.Hardswish, "recomputed": Block}[kind]()
    net = nn.Sequential(module, nn.Linear(32, 32))
    x = batch()
    want = net.eval()(x)
    net.train()
    if kind == "recomputed":
        recompute({"0": module})
    else:
        hotrain.convert(net, "exact", memory="block")
    assert isinstance(module, Mixin)
    _keep_forward(module)
    keep_all(net)
    hotrain.revert(net)
    assert not isinstance(module, Mixin)
    assert torch.equal(net.eval()(x), want)


class LlamaLikeRMSNorm(nn.Module):
    """Composed, as transformers composes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(32)), 1e-6

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(hidden_states.dtype)


def test_compiled_classes_count_their_graphs_apart() -> None:
    """Dynamo compiles a code eight times at most (three here): forwards of many classes must not share one."""
    torch._dynamo.reset()
    kinds = [type(f"Net{i}", (Net,), {}) for i in range(2)]
    try:
        with torch._dynamo.config.patch(recompile_limit=3):
            for kind in kinds:
                net = kind(dropout=0.0)
                hotrain.convert(net, "exact", memory="block")
                run = torch.compile(net, backend="eager", fullgraph=True)  # raises where the limit is reached
                for mode in (True, False):
                    net.train(mode)
                    run(batch())
    finally:
        torch._dynamo.reset()


def test_converting_again_changes_what_is_asked() -> None:
    """Twice is once; "linear" takes the modes off; "exact" with memory="linear" leaves nothing."""
    net = converted()
    once = step(net)
    hotrain.convert(net, "hot-unbiased", memory="block")
    assert all(torch.equal(g, w) for g, w in zip(step(net), once, strict=True))
    linear = Net()
    hotrain.convert(linear, "hot-unbiased", memory="linear")
    hotrain.convert(net, "hot-unbiased", memory="linear")
    assert type(net) is Net
    assert all(torch.equal(g, w) for g, w in zip(step(net), step(linear), strict=True))
    hotrain.convert(net, "exact", memory="block")
    hotrain.convert(net, "exact", memory="linear")
    assert all(torch.equal(g, w) for g, w in zip(step(net), step(Net()), strict=True))


def test_evaluation_and_no_grad_are_exact() -> None:
    net, plain = converted("exact"), Net()
    for mode in (net, plain):
        mode.eval()
    with saving() as held:
        y = net(batch())
    assert torch.equal(y, plain(batch()))
    assert not any(t.dtype == torch.uint8 for t in held)
    assert all(torch.equal(g, w) for g, w in zip(step(net), step(plain), strict=True))


def test_a_compiled_model_is_refused_and_a_replaced_forward_is_told() -> None:
    """What is compiled already was traced with the exact model; what is set on an instance is not the class's."""
    net = Net()
    with pytest.raises(ValueError, match="compiled already"):
        hotrain.convert(torch.compile(net), "exact", memory="block")
    assert type(net) is Net
    net.forward = functools.partial(Net.forward, net)  # type: ignore[method-assign]
    report = hotrain.convert(net, "exact", memory="block")
    assert "forward was replaced" in str(report)


def test_lora() -> None:
    """Adapters train on the converted base; the base's frozen weights keep no input."""
    import hotrain.train

    peft = pytest.importorskip("peft")
    net = Net(dropout=0.0)
    exact = copy.deepcopy(net)
    config = peft.LoraConfig(target_modules=["qkv", "fc1"], r=4)
    hotrain.convert(net, "exact", memory="block")
    grads = []
    for model in (net, exact):
        torch.manual_seed(2)
        adapted = peft.get_peft_model(model, config)
        with torch.no_grad():
            for name, p in adapted.named_parameters():
                if "lora_B" in name:
                    p.normal_(std=0.1, generator=torch.Generator().manual_seed(4))
        loss(adapted(batch().requires_grad_())).backward()
        grads.append(torch.cat([p.grad.flatten() for p in adapted.parameters() if p.grad is not None]))
    assert (grads[0] - grads[1]).norm() <= 0.2 * grads[1].norm()
    assert not torch.equal(grads[0], grads[1])


def _worker(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        from torch.distributed.fsdp import fully_shard

        from hotrain.compress.operators import base

        base.SMALL = 2
        found: dict[str, Any] = {}
        net = converted("exact", dropout=0.0)
        found["alone"] = step(net)
        step(DistributedDataParallel(net))
        found["ddp"] = [p.grad for p in net.parameters()]
        net = converted("exact", dropout=0.0)
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        step(net)
        found["fsdp"] = [p.grad.full_tensor() for p in net.parameters()]  # type: ignore[union-attr]
        torch.save(found, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    """Codes draw nothing: on equal batches the averaged gradients of DDP and FSDP2 are those of one process."""
    for found in found_by_each(_worker, tmp_path):
        for way in ("ddp", "fsdp"):
            for got, want in zip(found[way], found["alone"], strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["NewGELUActivation", "FastGELUActivation"])
def test_gelu_that_a_model_writes_out_is_one_function_when_compiled(name: str) -> None:
    """Eager mode runs the model's own operations; compiled, the codes of its input are all that is saved of it."""
    activations = pytest.importorskip("transformers.activations")
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(32, 64), getattr(activations, name)(), nn.Linear(64, 8)).train()
    x, kept = torch.randn(512, 32), []
    want = model(x)
    want.square().mean().backward()
    exact = [p.grad.clone() for p in model.parameters()]
    hotrain.convert(model, "exact", memory="block")
    assert torch.equal(model(x), want)

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        kept.extend(str(node.target) for node in gm.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(gm, inputs)

    model.zero_grad()
    y = torch.compile(model, backend=backend)(x)
    y.square().mean().backward()
    assert sum("hotrain.curve" in target for target in kept) == 1
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
    for p, grad in zip(model.parameters(), exact, strict=True):
        # Derivatives and the second layer's x are of codes of 8 bits, half a step of 1/127 of a group's largest off.
        assert (p.grad - grad).norm() < 0.01 * grad.norm()
    hotrain.revert(model)
    assert type(model[1]).__name__ == name
    assert not any("hotrain" in key for key in model[1].__dict__)

"""Compiled graphs with kernels in them: what is merged, what is kept exact, and that the gradients stay."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("triton")

from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes

import hotrain
from hotrain import autograd, geometry, kernels
from hotrain.compress import choosing, compiled, costs, fusing, in_place, kernel_nodes, layouts
from hotrain.compress.operators import gated
from hotrain.planning import Roofs

ROOFS = Roofs(copy=4e12, product=7e14)
WIDTH = 128  # of rows: 2 × 96 of them are worth compressing


@pytest.fixture(autouse=True)
def _on_kernels(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Iterator[None]:
    """The kernels in the interpreter, where there is no GPU; on a GPU, too, choices by bytes, and no TF32.

    Operators stay what they are there: the nodes that replace them on a GPU, and operators that write in place, are not
    what is asked here.
    """
    if device.type == "cpu":
        monkeypatch.setattr(autograd, "KERNELS", dict.fromkeys(("cpu", "cuda"), kernels))
    monkeypatch.setattr(costs, "_in_turns", lambda node, nbytes: None)
    monkeypatch.setattr(costs, "_measured", {})
    monkeypatch.setattr(kernel_nodes, "insert", lambda half: False)
    monkeypatch.setattr(in_place, "write", lambda half: False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, after: bool) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.after = after

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def feed(self, x: Tensor) -> Tensor:
        return self.narrow(F.gelu(self.wide(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.after:
            x = self.first(x + self.attend(x))
            return self.second(x + self.feed(x))
        x = x + self.attend(self.first(x))
        return x + self.feed(self.second(x))


class Traced:
    """A model's step through hotrain's partitioner; keeps the graphs of forward and backward."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.graphs = model, {}

        def keep(name: str) -> Callable[..., Any]:
            def compiler(gm: torch.fx.GraphModule, _: Any) -> Any:
                self.graphs[name] = gm
                return make_boxed_func(gm.forward)

            return compiler

        def partition(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            joint_graph_passes(gm)  # as Inductor does before
            return compiled.partition(gm, *args, **kwargs)

        backend = aot_autograd(
            fw_compiler=keep("forward"),
            bw_compiler=keep("backward"),
            partition_fn=partition,
            decompositions=select_decomp_table(),
        )
        self.call = torch.compile(model, backend=backend, fullgraph=True)

    def calls(self, name: str, target: Any) -> list[torch.fx.Node]:
        return list(self.graphs[name].graph.find_nodes(op="call_function", target=target))

    def saved(self) -> int:
        places = self.graphs["backward"].graph.find_nodes(op="placeholder")
        return sum(t.nbytes for node in places if isinstance(t := node.meta.get("val"), Tensor))


def models(after: bool, device: torch.device) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(after)).to(device).train()
    hotrain.convert(model, "exact", memory="block")
    return model, torch.randn(2, 96, WIDTH, device=device)


def step(call: Any, model: nn.Module, x: Tensor, autocast: bool) -> list[Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        y = call(x)
    y.float().mul(torch.linspace(-1, 1, WIDTH, device=x.device)).square().mean().backward()
    return [y.detach().float(), x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


def difference(got: list[Tensor], want: list[Tensor]) -> float:
    """Of the whole gradient; single ones may be sums that cancel."""
    one, other = (torch.cat([t.double().flatten() for t in part]) for part in (got, want))
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.parametrize(
    ("after", "autocast"),
    [(False, True), (False, False), (True, True)],
    ids=["norm first", "norm first, float32", "norm after"],
)
def test_sums_and_casts_around_norms_are_merged(
    after: bool, autocast: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In residual networks of both kinds; the values are those of the graph without merging.

    In float32 they are equal but for the order of an addition, under autocast to the rounding of a few values that are
    between two of bfloat16, which the interpreter cuts off.
    """
    model, x = models(after, device)
    merged = Traced(model)
    got = step(merged.call, model, x, autocast)
    torch._dynamo.reset()
    monkeypatch.setattr(fusing, "fuse", lambda graph: False)
    plain = Traced(model)
    want = step(plain.call, model, x, autocast)
    assert difference(got, want) < (0.05 if autocast else 1e-5)
    norms = merged.calls("forward", torch.ops.hotrain.norm_forward.default)
    assert len(norms) == 2
    assert sum(node.args[1] is not None for node in norms) == (2 if after else 1), "but the first reads no sum"
    add = torch.ops.aten.add.Tensor
    assert len(merged.calls("forward", add)) == (0 if after else 1), "the last sum is nobody's"
    gradients = merged.calls("backward", torch.ops.hotrain.norm_backward.default)
    if not after:
        assert all(node.args[5] is not None for node in gradients), "the shortcut's gradient"
    if autocast:
        assert sum(node.args[8] == torch.bfloat16 for node in gradients) >= 1, "the next product's copy"
    functions = merged.calls("backward", torch.ops.hotrain.activation_gradient.default)
    assert [node.args[-1] for node in functions] == [True], "wide's bias gradient"
    assert not any(node.args[-1] for node in plain.calls("backward", torch.ops.hotrain.activation_gradient.default))


class Images(nn.Module):
    """Convolutions before a norm and before a function, as of ConvNeXt, or of PVT-v2 (`flat`)."""

    def __init__(self, flat: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.depth = nn.Conv2d(32, 32, 3, padding=1, groups=32, dtype=dtype)
        self.norm = nn.LayerNorm(32)
        self.wide = nn.Linear(32, WIDTH, dtype=dtype)
        self.mix, self.out = (nn.Conv2d(WIDTH, WIDTH, 1, dtype=dtype) for _ in range(2))
        self.flat = flat

    def tokens(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2) if self.flat else x.permute(0, 2, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.tokens(self.depth(x)).float()).to(x.dtype)
        y = F.gelu(self.wide(y)).view(*x.shape[:1], *x.shape[2:], WIDTH)
        y = F.gelu(self.tokens(self.mix(y.permute(0, 3, 1, 2)))).view(y.shape)
        return self.out(y.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def image(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(2, 32, 16, 16, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("flat", "dtype"), [(False, torch.float32), (True, torch.bfloat16)], ids=["", "flat"])
def test_biases_of_convolutions_are_added_by_what_reads_them(
    flat: bool, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum is not rounded to bfloat16 any more, which moves codes."""
    torch.manual_seed(0)
    model, x = Images(flat, dtype).to(device).train(), image(dtype, device)
    hotrain.convert(model, "exact", memory="block")
    merged = Traced(model)
    got = step(merged.call, model, x, False)
    torch._dynamo.reset()
    monkeypatch.setattr(fusing, "fuse", lambda graph: False)
    plain = Traced(model)
    want = step(plain.call, model, x, False)
    assert difference(got[:1], want[:1]) < (1e-6 if dtype == torch.float32 else 0.01)
    assert difference(got[1:], want[1:]) < (0.002 if dtype == torch.float32 else 0.02)
    convolution = torch.ops.aten.convolution.default
    assert [n.args[2] is None for n in plain.calls("forward", convolution)] == [False] * 3
    assert [n.args[2] is None for n in merged.calls("forward", convolution)] == [True, True, False], "the last is read"
    (norm,) = merged.calls("forward", torch.ops.hotrain.norm_forward.default)
    taken = [n for n in merged.calls("forward", torch.ops.hotrain.activate.default) if n.args[-1] is not None]
    assert len(taken) == 1
    assert [n.meta["val"].shape for n in (norm.args[10], *(n.args[-1] for n in taken))] == [(32,), (WIDTH,)]


class Read(nn.Module):
    """Convolutions whose sum with the bias is read elsewhere, or whose channels are not the last axis in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.planes = nn.Conv2d(32, 32, 1), nn.Conv2d(32, 32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.twice(x)
        return F.gelu(y) + y, F.gelu(self.planes(x.contiguous()))


def test_a_bias_stays_where_the_sum_is_needed(device: torch.device) -> None:
    model, x = Read().to(device).train(), image(torch.float32, device)
    hotrain.convert(model, "exact", memory="block")
    traced = Traced(model)
    traced.call(x)
    assert [n.args[2] is None for n in traced.calls("forward", torch.ops.aten.convolution.default)] == [False] * 2
    assert [n.args[-1] for n in traced.calls("forward", torch.ops.hotrain.activate.default)] == [None, None]


def kept_exact(graph: torch.fx.Graph, gains: float, spare_ms: float = 0.0) -> dict[str, tuple[int, int]]:
    """What `choose` keeps exact, of how many calls."""
    return {what: counts for what, counts in choosing.choose(graph, ROOFS, gains, spare_ms)[0].items() if counts[0]}


def chosen(
    gains: float, device: torch.device, monkeypatch: pytest.MonkeyPatch, spare_ms: float = 0.0
) -> tuple[dict[str, Any], int, float]:
    """What is kept exact, saved bytes, and the gradient's difference from the exact model's."""
    model, x = models(False, device)
    kept: dict[str, Any] = {}

    def choose(gm: torch.fx.GraphModule) -> float:
        kept.update(kept_exact(gm.graph, gains, spare_ms))
        gm.recompile()
        return math.inf

    monkeypatch.setattr(compiled, "_choose", choose)
    traced = Traced(model)
    got = step(traced.call, model, x, False)
    hotrain.revert(model)
    return kept, traced.saved(), difference(got, step(model, model, x, False))


def test_what_costs_too_much_is_kept_exact(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing where layers gain enough; attention first where they lose; all that can be where they lose more."""
    none, least, error = chosen(1e3, device, monkeypatch)
    torch._dynamo.reset()
    some, more, smaller = chosen(-3e-4, device, monkeypatch)
    torch._dynamo.reset()
    every, most, smallest = chosen(-1e3, device, monkeypatch)
    assert none == {}
    assert some["scaled_dot_product_attention"] == (1, 1)
    assert every["scaled_dot_product_attention"] == (1, 1)
    assert every["linear (exact product)"][0] == every["linear (exact product)"][1] == 3, "also GELU's result, restored"
    assert least < more < most
    assert error > smaller > smallest > 0
    assert error < 0.2
    torch._dynamo.reset()
    assert chosen(-1e3, device, monkeypatch, spare_ms=1e6)[:2] == (none, least), "the time that was measured to be left"


class Capped(nn.Module):
    """Logits between -30 and 30, as Gemma 2 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return 30 * torch.tanh(self.head(x) / 30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_function_without_a_kernel_is_kept_exact(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no time to pack what it reads: the gradients are those of exact training then."""
    torch.manual_seed(0)
    model, x = Capped().to(device, dtype).train(), torch.randn(8, 64, 64, device=device, dtype=dtype)
    want = step(model, model, x, False)
    found, errors, saved = [], [], []
    for gains in (1e3, -1e3):
        torch._dynamo.reset()
        hotrain.convert(model, "exact", memory="block")

        def choose(gm: torch.fx.GraphModule, gains: float = gains) -> float:
            found.append(kept_exact(gm.graph, gains).get("tanh", (0, 1)))
            choosing.forget(gm.graph)
            gm.recompile()
            return 0.0

        monkeypatch.setattr(compiled, "_choose", choose)
        traced = Traced(model)
        got = step(traced.call, model, x, False)
        saved.append(traced.saved())
        hotrain.revert(model)
        errors.append(difference(got, want))
    assert found == [(0, 1), (1, 1)]
    assert errors[0] > 1.5 * errors[1]
    assert errors[1] < (1e-5 if dtype == torch.float32 else 0.01)
    assert saved[0] < saved[1]


def test_a_converted_layer_keeps_the_codes_that_its_record_names(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind an attention that is kept exact: the output alone is packed for it."""
    model, x = models(False, device)
    hotrain.revert(model)
    want = step(model, model, x, False)
    hotrain.convert(model, "hq8", plan="memory")

    def choose(gm: torch.fx.GraphModule) -> float:
        assert choosing.choose(gm.graph, ROOFS, -1e3)[0]["scaled_dot_product_attention"] == (1, 1)
        gm.graph.lint()
        gm.recompile()
        return math.inf

    monkeypatch.setattr(compiled, "_choose", choose)
    traced = Traced(model)
    got = step(traced.call, model, x, False)
    assert not traced.calls("forward", torch.ops.hotrain.keep_heads.default)
    assert not traced.calls("forward", torch.ops.aten.index.Tensor), "nor are there middles of k and v"
    readers = torch.ops.hotrain.restore_codes.default, torch.ops.hotrain.keep_from_codes.default
    words = [str(n.args[1]) for target in readers for n in traced.calls("backward", target)]
    assert sum(word.startswith("output,") for word in words) == 1
    assert difference(got, want) < 0.2


@pytest.mark.parametrize("shared", [False, True], ids=["", "read twice"])
def test_the_gradient_of_an_activation_function_is_read_as_codes(shared: bool, device: torch.device) -> None:
    """By the layer before it alone; where that is not all that reads it, it is written."""

    class Feed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 512), nn.Linear(512, WIDTH)
            self.other = nn.Linear(WIDTH, 512, bias=False) if shared else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            wide = self.wide(y)
            return self.narrow(F.gelu(wide + self.other(y) if shared else wide))

    torch.manual_seed(0)
    model, x = Feed().to(device).train(), torch.randn(2, 96, WIDTH, device=device)
    want = step(model, model, x, False)
    hotrain.convert(model, "hq8", plan="memory")
    traced = Traced(model)
    got = step(traced.call, model, x, False)
    ours = torch.ops.hotrain
    counts = [
        len(traced.calls("backward", op)) for op in (ours.products_of_codes.default, ours.activation_gradient.default)
    ]
    assert counts == ([0, 1] if shared else [1, 0])
    assert difference(got, want) < 0.05


class Attention(nn.Module):
    """With q, k and v of one layer, in the orders that libraries have them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.norm = kind, nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv, (samples, tokens, width) = self.qkv(self.norm(x)), x.shape
        if self.kind in ("stack", "scaled"):  # timm
            q, k, v = qkv.reshape(samples, tokens, 3, 4, width // 4).permute(2, 0, 3, 1, 4).unbind(0)
        elif self.kind == "split":  # GPT-2
            q, k, v = (t.view(samples, tokens, 4, width // 4).transpose(1, 2) for t in qkv.split(width, 2))
        else:  # GPT-NeoX
            q, k, v = qkv.view(samples, tokens, 4, 3, width // 4).permute(3, 0, 2, 1, 4).unbind(0)
        if self.kind == "scaled":
            q = q * 0.5
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("kind", "merged"), [("stack", True), ("split", True), ("by head", False), ("scaled", False)])
def test_the_gradients_of_q_k_and_v_are_read_where_they_are(kind: str, merged: bool, device: torch.device) -> None:
    """They are not written side by side for the layer that made them. In another order in memory they are no parts of
    a row, and what a formula makes is in no memory yet: the compiler writes it side by side at once."""
    torch.manual_seed(0)
    model, x = Attention(kind).to(device).train(), torch.randn(2, 96, WIDTH, device=device)
    want = step(model, model, x, False)
    hotrain.convert(model, "hq8", plan="memory")
    traced = Traced(model)
    got = step(traced.call, model, x, False)
    ours, aten = torch.ops.hotrain, torch.ops.aten
    calls, *joins = (
        len(traced.calls("backward", target))
        for target in (ours.grad_codes_of_parts.default, aten.cat.default, aten.stack.default)
    )
    assert calls == merged
    assert sum(joins) == (not merged)
    assert difference(got, want) < 0.05


@pytest.mark.parametrize(("kind", "merged"), [("stack", True), ("split", True), ("scaled", False)])
def test_a_plan_counts_that_they_are_not_written_side_by_side(
    kind: str, merged: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of a write and a read of the layer's g_y, by the roof of copies."""
    model, x = Attention(kind).to(device).train(), torch.randn(2, 96, WIDTH, device=device)
    hotrain.convert(model, "hq8", plan="memory")
    found: list[float] = []
    monkeypatch.setattr(compiled, "_choose", lambda gm: found.append(choosing._behind(gm.graph, ROOFS)) or math.inf)
    step(Traced(model).call, model, x, False)
    g_y = 4 * 2 * 96 * 3 * WIDTH
    assert found == [pytest.approx(1e3 * 2 * g_y / ROOFS.copy if merged else 0.0)]


def test_the_report_names_no_format_that_did_not_run(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept exact is said to be, and where all of it is, its format is gone."""
    model, x = models(False, device)
    report = hotrain.convert(model, plan="speed")
    assert report.buffers is not None
    monkeypatch.setattr(report.buffers, "gains", lambda model, layers: -1e3)
    monkeypatch.setattr(compiled, "_device_roofs", lambda gm: ROOFS)
    step(Traced(model).call, model, x, False)
    assert "scaled_dot_product_attention" not in report.buffers.formats
    assert "scaled_dot_product_attention, 1 of 1" in report.buffers.full
    assert "layer_norm" in report.buffers.formats


def test_nothing_is_chosen_for_a_graph_of_any_batch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask a symbolic size for its number would specialize the graph."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(
        compiled, "_choose", lambda gm: found.append(choosing.choose(gm.graph, ROOFS, -1e3)[0]) or math.inf
    )
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.GELU()).to(device).train()  # a Linear specializes its batch
    hotrain.convert(model, "exact", memory="block")
    x = torch.randn(2, 96, WIDTH, device=device)
    torch._dynamo.mark_dynamic(x, 0)
    Traced(model).call(x).sum().backward()
    assert found == [{}]


def test_choices_are_only_made_where_the_model_must_not_become_slower(device: torch.device) -> None:
    """Not where memory was asked for, and where there is a device to ask for its roofs."""
    model, x = models(False, device)
    asked = hotrain.convert(model, "exact", memory="block")
    assert asked.buffers is not None
    assert not asked.buffers.must_not_lose
    hotrain.revert(model)
    for plan in ("memory", "speed", "graphs"):
        report = hotrain.convert(model, plan=plan)
        assert report.buffers is not None
        assert report.buffers.must_not_lose == (plan != "memory")
        assert report.buffers.gained([]) == 0.0
        hotrain.revert(model)
    hotrain.convert(model)
    if device.type == "cpu":
        traced = Traced(model)
        step(traced.call, model, x, False)
        assert not traced.calls("backward", torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default)


def no_time_left(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """Let the next graph keep exact all that can be; what that was, once it is partitioned."""
    kept: dict[str, tuple[int, int]] = {}

    def choose(gm: torch.fx.GraphModule) -> float:
        kept.update(kept_exact(gm.graph, -1e3))
        choosing.forget(gm.graph)
        gm.recompile()
        return math.inf

    monkeypatch.setattr(compiled, "_choose", choose)
    return kept


class Masked(Block):
    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        tokens = torch.arange(x.shape[1], device=x.device)
        mask = (tokens[:, None] >= tokens[None, :])[None, None]
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class Composed(Block):
    """Attention written out, as windows have it: backward of softmax and of the product behind it read its result."""

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * 0.1).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("tokens", [96, 49])  # whole groups of codes; Swin's windows, whose rows are padded
def test_a_softmax_is_kept_exact_with_the_product_behind_it(
    tokens: int, late: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its codes were packed as well, and their time was in no sum. Put back, gradients are exact's."""
    torch.manual_seed(0)
    model, x = Composed(False).to(device).train(), torch.randn(8, tokens, WIDTH, device=device)
    want = step(model, model, x, False)
    hotrain.convert(model, "exact", memory="block")
    kept = no_time_left(monkeypatch) if late else {}
    traced = Traced(model)
    got = step(traced.call, model, x, False)
    (exponential,) = traced.calls("forward", torch.ops.aten.exp.default)
    rounded, waiting = [], [exponential]
    while waiting:  # up to the product, what the weights become
        for user in waiting.pop().users:
            if user.target is torch.ops.aten.round.default:
                rounded.append(user)
            elif user.op == "call_function" and "mm" not in str(user.target):
                waiting.append(user)
    assert bool(rounded) is not late
    assert bool({"matmul", "mul"} & kept.keys()) is late
    assert difference(got, want) < (1e-2 if late else 0.3)  # its norms' codes stay, in 4 bits


def test_attention_with_a_mask_can_be_kept_exact(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTAutograd gives its backward the metadata of the mask's nodes, which are forward's first."""
    torch.manual_seed(0)
    model, x = Masked(False).to(device).train(), torch.randn(2, 96, WIDTH, device=device)
    want = step(model, model, x, False)
    hotrain.convert(model, "exact", memory="block")
    kept = no_time_left(monkeypatch)
    got = step(Traced(model).call, model, x, False)
    assert kept["scaled_dot_product_attention"] == (1, 1)
    assert difference(got, want) < 0.1


def gradients(call: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    """Of the parameters."""
    model.zero_grad()
    call(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(32, 32, 3, padding=1, bias=False) for _ in range(2))
        self.one, self.two = nn.BatchNorm2d(32), nn.BatchNorm2d(32)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.two(self.second(F.relu(self.one(self.first(x))))))


def test_inputs_that_are_made_of_a_batch_norms_codes_are_kept_exact_too(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a recipe makes: γ x̂ + β behind a ReLU, and a block's output, which has codes of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(Residual(), Residual()).to(device, memory_format=torch.channels_last).train()
    x = torch.randn(8, 32, 10, 10, device=device).to(memory_format=torch.channels_last)

    want = gradients(model, model, x)
    hotrain.convert(model, "exact", memory="block")
    made = torch.ops.hotrain.restore_codes.default
    all_codes = Traced(model)
    approximate = difference(gradients(all_codes.call, model, x), want)
    assert len(all_codes.calls("backward", made)) == 4
    torch._dynamo.reset()
    kept = no_time_left(monkeypatch)
    exact_inputs = Traced(model)
    got = gradients(exact_inputs.call, model, x)
    assert kept == {"conv2d (exact product)": (4, 4)}
    assert not exact_inputs.calls("backward", made)
    assert difference(got, want) < approximate
    hotrain.revert(model)


def groups(channels: int, affine: bool) -> nn.Module:
    return nn.GroupNorm(4, channels, affine=affine)


def instances(channels: int, affine: bool) -> nn.Module:
    return nn.InstanceNorm2d(channels, affine=affine)


class Activated(nn.Module):
    """Norms with a function behind, with a shortcut, and alone."""

    def __init__(
        self, f: Callable[[Tensor], Tensor], affine: bool, norm: Callable[[int, bool], nn.Module] | None = None
    ) -> None:
        super().__init__()
        self.f = f
        self.convs = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1, bias=False) for _ in range(3))
        make = norm or (lambda channels, affine: nn.BatchNorm2d(channels, affine=affine))
        self.norms = nn.ModuleList(make(32, affine) for _ in range(3))
        for norm in self.norms:
            if affine:
                nn.init.uniform_(norm.weight, 0.5, 1.5)
                nn.init.normal_(norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](self.convs[0](x))
        y = self.f(self.norms[1](self.convs[1](x)))
        return self.f(self.norms[2](self.convs[2](y)) + x)


@pytest.mark.parametrize(
    ("f", "affine", "norm"),
    [
        (F.relu, True, None), (F.relu, False, None), (F.silu, True, None), (F.gelu, True, None),
        (F.silu, True, groups), (F.relu, False, groups), (F.relu, True, instances),
    ],
    ids=["relu", "relu, no parameters", "silu", "gelu", "groups", "groups, no parameters", "instances"],
)  # fmt: skip
def test_norms_of_images_can_be_kept_exact(
    f: Callable[[Tensor], Tensor],
    affine: bool,
    norm: Callable[[int, bool], nn.Module] | None,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where every operator costs time: the gradients of exact training, in float32's rounding."""
    torch.manual_seed(0)
    model = Activated(f, affine, norm).to(device, memory_format=torch.channels_last).train()
    x = torch.randn(8, 32, 10, 10, device=device).to(memory_format=torch.channels_last)

    want = gradients(model, model, x)
    hotrain.convert(model, "exact", memory="block")
    monkeypatch.setattr(costs, "excess", lambda node, roofs: 1.0)
    monkeypatch.setattr(compiled, "SMALL", math.inf)  # what is saved then is not packed by formulas
    kept = no_time_left(monkeypatch)
    step = Traced(model)
    got = gradients(step.call, model, x)
    assert kept["group_norm" if norm else "batch_norm"] == (3, 3)
    for name in ("normalize", "norm_gradient", "keep_codes", "restore_codes"):
        target = getattr(torch.ops.hotrain, name).default
        assert step.calls("forward", target) + step.calls("backward", target) == []
    assert difference(got, want) < 1e-5


@pytest.mark.parametrize("norm", [groups, instances])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=["channels_last", "default"])
def test_group_norms_are_kernels(
    norm: Callable[[int, bool], nn.Module],
    layout: torch.memory_format,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the function and the shortcut behind; the layers behind make their inputs of the same codes. The result is
    exact's in float32's rounding, and gradients have the error of 4 bits of x̂ and of f's slope."""
    torch.manual_seed(0)
    for module in (geometry, layouts):
        monkeypatch.setattr(module, "LAID_OUT", geometry.LAID_OUT | {device.type})
    model = Activated(F.silu, True, norm).to(device, memory_format=layout).train()
    x = torch.randn(8, 32, 10, 10, device=device).to(memory_format=layout)
    y, want = model(x), gradients(model, model, x)
    report = hotrain.convert(model, "exact", memory="block")
    step = Traced(model)
    got = gradients(step.call, model, x)
    assert len(step.calls("forward", torch.ops.hotrain.normalize.default)) == 3
    assert len(step.calls("backward", torch.ops.hotrain.norm_gradient.default)) == 3
    assert report.buffers is not None
    assert report.buffers.formats["group_norm"] == "int4 nearest/row"
    assert "group_norm" not in report.buffers.full
    torch.testing.assert_close(step.call(x), y, rtol=1e-4, atol=1e-4)
    assert difference(got, want) < 0.1


class Hooked(nn.Module):
    """A hook on the gradient of a norm's result, before or after an activation function reads it."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        self.before, self.conv, self.norm = before, nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        if self.before:
            y.register_hook(lambda g: 2 * g)
        z = F.relu(y)
        if not self.before:
            y.register_hook(lambda g: 2 * g)
        return z + y


def test_a_hook_on_a_norms_result(device: torch.device) -> None:
    """The operator that computes norm and function passes it by: it is not made, and where it is, the hook is refused
    (its gradient was not doubled, silently)."""
    torch.manual_seed(0)
    x = torch.randn(8, 32, 10, 10, device=device).to(memory_format=torch.channels_last)
    early, late = (Hooked(before).to(device, memory_format=torch.channels_last).train() for before in (True, False))
    want = gradients(early, early, x)
    for model in early, late:
        hotrain.convert(model, "exact", memory="block")
    assert difference(gradients(Traced(early).call, early, x), want) < 0.2
    with pytest.raises(Exception, match="hook"):
        Traced(late).call(x)


def test_a_batch_norm_whose_codes_a_layer_reads_is_not_kept_exact(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else costs time here: the layers make their inputs of two norms' codes, the last is read by none."""
    torch.manual_seed(0)
    model = Activated(F.relu, True).to(device, memory_format=torch.channels_last).train()
    x = torch.randn(8, 32, 10, 10, device=device).to(memory_format=torch.channels_last)
    hotrain.convert(model, "exact", memory="block")
    ours = (torch.ops.hotrain.normalize.default, torch.ops.hotrain.norm_gradient.default)
    monkeypatch.setattr(costs, "excess", lambda node, roofs: 1.0 if node.target in ours else 0.0)
    kept = no_time_left(monkeypatch)
    step = Traced(model)
    step.call(x).square().mean().backward()
    assert kept == {"batch_norm": (1, 3)}
    assert len(step.calls("forward", ours[0])) == len(step.calls("backward", ours[1])) == 2


@pytest.mark.parametrize("faster", [True, False])
def test_statistics_are_the_compilers_where_the_kernel_is_slower(
    faster: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is packed less for it; the gradients are those of the kernel's statistics but for their rounding."""
    torch.manual_seed(0)
    model = Activated(F.relu, True).to(device, memory_format=torch.channels_last).train()
    x = torch.randn(8, 32, 10, 10, device=device).to(memory_format=torch.channels_last)
    hotrain.convert(model, "exact", memory="block")
    plain = Traced(model)
    want = gradients(plain.call, model, x)
    torch._dynamo.reset()
    target = torch.ops.hotrain.channel_statistics.default
    assert len(plain.calls("forward", target)) == 3
    cost = -1.0 if faster else 1.0
    monkeypatch.setattr(costs, "excess", lambda node, roofs: cost if node.target is target else 0.0)
    late: list[float] = []

    def choose(gm: torch.fx.GraphModule) -> float:
        kept, left = choosing.choose(gm.graph, ROOFS, 0.0)
        assert not any(exact for exact, _ in kept.values())
        late.append(-left)
        choosing.forget(gm.graph)
        gm.recompile()
        return math.inf

    monkeypatch.setattr(compiled, "_choose", choose)
    chosen = Traced(model)
    got = gradients(chosen.call, model, x)
    assert late == [-3.0 if faster else 0.0]
    assert len(chosen.calls("forward", target)) == (3 if faster else 0)
    assert len(chosen.calls("forward", torch.ops.aten.var_mean.correction)) == (0 if faster else 3)
    assert difference(got, want) < 0.01  # some codes move
    hotrain.revert(model)


class Response(nn.Module):
    """A linear layer over images' channels, and a response normalization, which reads its result three times."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.wide = nn.Conv2d(32, 32, 3, padding=1), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = F.mish(self.wide(self.conv(x).permute(0, 2, 3, 1)))
        return self.conv((y * y.norm(dim=(1, 2), keepdim=True) + y)[..., :32].permute(0, 3, 1, 2))


def test_what_is_no_image_crosses_the_cut_as_a_matrix(device: torch.device) -> None:
    """Inductor takes saved tensors of four axes for images, in a model with convolutions."""
    torch.manual_seed(0)
    model = Response().to(device).train()
    x = torch.randn(4, 32, 8, 8, device=device)
    model(x).square().mean().backward()
    want = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    hotrain.convert(model, "exact", memory="block")
    traced = Traced(model)
    traced.call(x).square().mean().backward()
    places = traced.graphs["backward"].graph.find_nodes(op="placeholder")
    assert [n for n in places if n.meta["val"].shape == (4, 8, 8, 64) and n.meta["val"].is_floating_point()] == []
    assert any(n.meta["val"].shape == (256, 64) and n.meta["val"].is_floating_point() for n in places)
    assert difference([p.grad for p in model.parameters() if p.grad is not None], want) < 0.2


def test_a_cost_without_a_measurement_is_bytes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one pack and one unpack: 16 bits read and 4 written, and a scale of 16 bits a group, then the reverse."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to(device).train()
    hotrain.convert(model, "exact", memory="block")
    x = torch.randn(2, 96, WIDTH, device=device)
    found: list[float] = []

    def choose(gm: torch.fx.GraphModule) -> float:
        for name in ("keep_codes", "restore_codes"):
            nodes = gm.graph.find_nodes(op="call_function", target=getattr(torch.ops.hotrain, name).default)
            found.extend(costs.excess(node, ROOFS) for node in nodes)
        return math.inf

    monkeypatch.setattr(compiled, "_choose", choose)
    with torch.autocast(device.type, torch.bfloat16):
        Traced(model).call(x)
    elements = x.numel()
    groups = elements // WIDTH
    one = 1e3 * (elements * 2 + elements / 2 + groups * 2) / ROOFS.copy
    assert found == pytest.approx([one] * 4)


class Branch(nn.Module):
    """A residual branch between two norms, changed by `change` before it is added."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.change = nn.Parameter(torch.randn(WIDTH)) if change == "scale" else None, change

    def forward(self, x: Tensor) -> Tensor:
        branch = self.one(self.first(x))
        if self.change == "dropout":
            branch = F.dropout(branch, 0.1)
        elif self.change == "stochastic depth, transformers":
            kept = 0.9 + torch.rand(len(x), 1, 1, dtype=branch.dtype, device=x.device)
            branch = branch.div(0.9) * kept.floor_()
        elif self.change == "stochastic depth":
            branch = branch * (torch.rand(len(x), 1, 1, device=x.device) < 0.9).to(branch.dtype)
        elif self.change == "transposed dropout":
            branch = F.dropout(branch.transpose(1, 2).contiguous().transpose(1, 2), 0.1)
        elif self.change == "gate of two":
            branch = branch * torch.sigmoid(x[:, 0, :2])[:, 1].view(-1, 1, 1)
        elif self.change == "one gate":
            branch = branch * self.one.weight[0, :1].view(1, 1, 1).expand(len(x), 1, 1)
        elif self.change == "sine":
            branch = torch.sin(branch)
        elif self.scale is not None:
            branch = branch * self.scale
        x = x + branch
        return x + self.two(self.second(x))


@contextlib.contextmanager
def inductor(change: str) -> Iterator[None]:
    """Dropout is a formula to Inductor's own generator alone, which needs its compiler; no graph of an earlier run."""
    with (
        torch._inductor.config.patch(fallback_random="dropout" not in change, fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


def norms_of(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    targets = torch.ops.hotrain.norm_forward.default, torch.ops.hotrain.norm_backward.default
    return [node for node in graph.nodes if node.target in targets]


@pytest.mark.parametrize(
    "change", ["", "dropout", "stochastic depth", "stochastic depth, transformers", "scale", "sine"]
)
def test_formulas_beside_norms_cost_what_a_compiler_would_not_move(
    change: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A branch's sine is written and read in float32; backward reads the second norm's gradient once more.

    Products are merged. For the gradient of a layer's scale exact training reads that gradient again, too.
    """
    torch.manual_seed(0)
    model, x = Branch(change).to(device).train(), torch.randn(2, 96, WIDTH, device=device)
    hotrain.convert(model, "exact", memory="block")
    found: list[int] = []

    def choose(gm: torch.fx.GraphModule) -> float:
        found.append(sum(map(fusing.unfused, norms_of(gm.graph))))
        choosing.forget(gm.graph)
        gm.recompile()
        return math.inf

    monkeypatch.setattr(compiled, "_choose", choose)
    with inductor(change):
        step(torch.compile(model) if change == "dropout" else Traced(model).call, model, x, False)
    assert found == [3 * x.nbytes if change == "sine" else 0]


def with_and_without_merging(
    change: str, autocast: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Tensor], list[Tensor], list[torch.fx.Graph]]:
    """A step with merging, one without it on the same random numbers, and the graphs of the first."""
    torch.manual_seed(0)
    model, x = Branch(change).to(device).train(), torch.randn(8, 96, WIDTH, device=device)
    hotrain.convert(model, "exact", memory="block")
    fuse, graphs = fusing.fuse, []

    def kept(graph: torch.fx.Graph) -> bool:
        changed = fuse(graph)
        graphs.append(graph)
        return changed

    def run() -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(1)
        with inductor(change):
            return step(torch.compile(model), model, x, autocast)

    monkeypatch.setattr(fusing, "fuse", kept)
    got = run()
    monkeypatch.setattr(fusing, "fuse", lambda graph: False)
    return got, run(), graphs


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("change", ["dropout", "stochastic depth", "stochastic depth, transformers", "scale"])
def test_products_of_a_branch_are_merged_with_the_norm(
    change: str, autocast: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward: of the same random numbers, the values of the graph without merging.

    Under autocast the product is not rounded to bfloat16 before it is added, which moves codes.
    """
    got, want, (forward, backward) = with_and_without_merging(change, autocast, device, monkeypatch)
    norms = forward.find_nodes(op="call_function", target=torch.ops.hotrain.norm_forward.default)
    assert [n.args[11] is not None for n in norms] == [False, True]
    gradients = backward.find_nodes(op="call_function", target=torch.ops.hotrain.norm_backward.default)
    assert [n.args[9] is not None for n in gradients] == [change != "scale", False]
    if change == "dropout":
        factors = [norms[1].args[11], gradients[0].args[9]]
        assert [n.target for n in factors[:1]] == [torch.ops.hotrain.drawn_mask.default]
        assert factors[1].op == "placeholder", "the saved bits, and not a copy of them"
    products = torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor, torch.ops.aten.where.self
    for graph in (forward, backward) if change != "scale" else (forward,):
        dense = [n for n in graph.nodes if n.target in products]
        assert not [n for n in dense if n.meta["val"].numel() == 8 * 96 * WIDTH and n.meta["val"].is_floating_point()]
    assert difference(got, want) < (0.05 if autocast else 1e-5)


@pytest.mark.parametrize("change", ["transposed dropout", "gate of two", "one gate"])
def test_products_that_the_kernel_would_read_otherwise_are_not_merged(
    change: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits that are packed in another order than that of the rows, and numbers that are not one behind the other."""
    got, want, (forward, backward) = with_and_without_merging(change, False, device, monkeypatch)
    norms = forward.find_nodes(op="call_function", target=torch.ops.hotrain.norm_forward.default)
    gradients = backward.find_nodes(op="call_function", target=torch.ops.hotrain.norm_backward.default)
    assert [n.args[11] for n in norms] == [None, None]
    assert [n.args[9] for n in gradients] == [None, None]
    assert difference(got, want) < 1e-5


class Sines(nn.Module):
    """A function without an operator of hotrain's."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.sin(self.one(x)))


@pytest.mark.parametrize("left", [math.inf, 0.0])
def test_formulas_quantize_as_much_as_there_is_time_for(
    left: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what backward reads of the sine's argument crosses the cut as it is."""
    torch.manual_seed(0)
    model, x = Sines().to(device).train(), torch.randn(2, 96, WIDTH, device=device)
    want = step(model, model, x, False)
    hotrain.convert(model, "exact", memory="block")
    monkeypatch.setattr(compiled, "_choose", lambda gm: choosing.forget(gm.graph) and left)
    traced = Traced(model)
    assert difference(step(traced.call, model, x, False), want) < 0.1
    places = traced.graphs["backward"].graph.find_nodes(op="placeholder")
    assert any("_codes_0" in node.name for node in places) == (left > 0)


def test_interpolation_leaves_time(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward as matrix products is faster than Inductor's: an amount for each element of the result."""
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.UpsamplingBilinear2d(scale_factor=4)).to(device).train()
    hotrain.convert(model, "exact", memory="block")
    found: list[float] = []

    def choose(gm: torch.fx.GraphModule) -> float:
        found.append(choosing._interpolation(gm.graph, ROOFS))
        choosing.forget(gm.graph)
        return math.inf

    monkeypatch.setattr(compiled, "_choose", choose)
    y = Traced(model).call(torch.randn(2, 16, 32, 32, device=device))
    assert found == [pytest.approx(1e3 * 100 * y.numel() / ROOFS.copy)]


class Gate(nn.Module):
    """A gated feed-forward layer, as of Llama, with what is between the activation and the product."""

    def __init__(self, f: Callable[[Tensor], Tensor], between: str = "") -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.f, self.between = f, between

    def forward(self, x: Tensor) -> Tensor:
        u = self.up(x)
        y = self.f(self.gate(x))
        if self.between == "written":
            y = y.mul_(0.5)
        elif self.between == "shifted":
            y = y + 1
        elif self.between == "rows":
            u = u.mean(-1, keepdim=True)
        elif self.between == "frozen":
            return self.down(y * u.detach()) + self.down(u)
        elif self.between == "other order":
            return self.down(u * y)
        elif self.between == "also read":
            return self.down(y * u) + self.down(y)
        return self.down(y * u)


GATED: dict[str, Callable[[], nn.Module]] = {"silu": nn.SiLU, "hardswish": nn.Hardswish}


def both_ways(
    model: nn.Module, x: Tensor, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Tensor], list[Tensor], int, int]:
    """The step with the operator and without it, how often it runs, and the bytes saved more than without."""
    merged = Traced(model)
    got = step(merged.call, model, x, autocast)
    torch._dynamo.reset()
    monkeypatch.setattr(gated, "_has_kernel", lambda *args: False)
    plain = Traced(model)
    want = step(plain.call, model, x, autocast)
    target = torch.ops.hotrain.gated_gradient.default
    assert plain.calls("backward", target) == []
    return got, want, len(merged.calls("backward", target)), merged.saved() - plain.saved()


@pytest.mark.parametrize("between", ["", "other order", "also read"])
@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_a_gated_activation_has_one_operator_in_backward(
    autocast: bool, name: str, between: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradients are those of the two formulas, which round once more; forward is the same to the bit."""
    torch.manual_seed(0)
    model, x = Gate(GATED[name](), between).to(device).train(), torch.randn(2, 96, WIDTH, device=device)
    hotrain.convert(model, "exact", memory="block")
    got, want, calls, bytes_more = both_ways(model, x, autocast, monkeypatch)
    assert calls == 1
    assert bytes_more == 0
    assert torch.equal(got[0], want[0])
    assert difference(got[1:], want[1:]) < (2**-7 if autocast else 1e-5)


@pytest.mark.parametrize(
    ("f", "between"),
    [
        (F.silu, "written"), (F.silu, "shifted"), (F.silu, "rows"), (F.silu, "frozen"), (F.gelu, ""), (F.relu, ""),
        (torch.tanh, ""),
    ],
    ids=["written to", "shifted", "broadcast", "no gradient", "gelu", "relu", "tanh"],
)  # fmt: skip
def test_what_is_no_gated_activation_keeps_its_two_formulas(
    f: Callable[[Tensor], Tensor], between: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A factor that is not the activation's result any more, another shape, no gradient, no saved input."""
    torch.manual_seed(0)
    model, x = Gate(f, between).to(device).train(), torch.randn(2, 96, WIDTH, device=device)
    hotrain.convert(model, "exact", memory="block")
    got, want, calls, _ = both_ways(model, x, False, monkeypatch)
    assert calls == 0
    assert difference(got, want) < 1e-6


def test_what_a_gate_packs_counts_though_a_layer_reads_it_too(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the layer's input exact, the gate's gradient still reads both codes: no candidate gains their time."""
    model, x = Gate(nn.SiLU()).to(device).train(), torch.randn(2, 96, WIDTH, device=device)
    hotrain.convert(model, "exact", memory="block")
    kept = torch.ops.hotrain.keep_codes.default
    monkeypatch.setattr(costs, "excess", lambda node, roofs: 1.0 if node.target is kept else 0.0)
    found: dict[str, float] = {}

    def choose(gm: torch.fx.GraphModule) -> float:
        gm.graph.eliminate_dead_code()
        (gradient,) = gm.graph.find_nodes(op="call_function", target=torch.ops.hotrain.gated_gradient.default)
        candidates, fixed = choosing._candidates(gm.graph, ROOFS)
        found.update({c.what: max(c.ms, found.get(c.what, 0.0)) for c in candidates}, fixed=sum(fixed))
        of_gate = {choosing.source_of(codes, lambda n: n.target is not kept) for codes in gradient.args[1]}
        found["gate"] = float(sum(node.target is kept for node in of_gate))
        choosing.forget(gm.graph)
        gm.recompile()
        return math.inf

    monkeypatch.setattr(compiled, "_choose", choose)
    step(Traced(model).call, model, x, False)
    assert found["fixed"] == found["gate"] == 2.0
    assert found["linear (exact product)"] < 1.0

"""Products of matrices whose rows are no multiple of 16 bytes are padded: the same numbers, whole rows, less time."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import hotrain
from hotrain.compress import compiled, padding
from hotrain.compress.formats import GROUPED
from hotrain.planning import Roofs
from hotrain.private import WRITTEN

BATCH, TOKENS, WIDTH = 6, 49, 32
ROOFS = Roofs(1e12, 1e14)
BMM, CLONE, SLICE = torch.ops.aten.bmm.default, torch.ops.aten.clone.default, torch.ops.aten.slice.Tensor
PAD = torch.ops.aten.constant_pad_nd.default
# One rounding of bfloat16 in a sum, relative to the largest.
CLOSE = 2.0**-8


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded products take no time, so that all are padded that can be."""
    monkeypatch.setattr(padding, "_measured", {})
    monkeypatch.setattr(padding, "_times", lambda operands: (1.0, 0.0))


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(dtype)


def padded(step: Callable[..., Any], *inputs: Tensor, roofs: Roofs | None = ROOFS) -> tuple[GraphModule, bool]:
    """The graph of a step after the pass, and whether it says to have changed it; its results are the step's."""
    gm = make_fx(step, tracing_mode="fake")(*inputs)
    changed = padding.pad(gm.graph, lambda: roofs)
    gm.graph.lint()
    gm.recompile()
    got, want = gm(*inputs), step(*inputs)
    for one, other in zip(*([t] if isinstance(t, Tensor) else t for t in (got, want)), strict=True):
        assert one.shape == other.shape
        assert one.stride() == other.stride()  # whoever has a graph's results relies on their layout
        torch.testing.assert_close(one, other, rtol=CLOSE, atol=CLOSE * other.abs().max().item())
    return gm, changed


def calls(gm: GraphModule, target: Any) -> list[Any]:
    return list(gm.graph.find_nodes(op="call_function", target=target))


def rows(gm: GraphModule) -> list[int]:
    """Of each product's operands and result, how many elements a row in memory has."""
    found = []
    for node in calls(gm, BMM):
        for t in (*node.args, node):
            value = t.meta["val"]
            found.append(value.shape[-1] if value.stride(-1) == 1 else value.shape[-2])
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attention_and_its_gradients(dtype: torch.dtype) -> None:
    """All six products, of matrices and of transposed ones; q, k and v are those of one tensor, as layers make it."""

    def step(qkv: Tensor, g: Tensor) -> list[Tensor]:
        q, k, v = (t.contiguous() for t in qkv.unbind(0))
        p = torch.softmax((q @ k.mT).float(), -1).to(dtype)
        g_p = (g @ v.mT).float()
        g_s = (p * (g_p - (g_p * p).sum(-1, keepdim=True))).to(dtype)
        return [(p @ v) * 2, (p.mT @ g) * 2, (g_s @ k) * 2, (g_s.mT @ q) * 2]

    gm, changed = padded(step, draw(3, BATCH, TOKENS, WIDTH, dtype=dtype), draw(BATCH, TOKENS, WIDTH, dtype=dtype))
    assert changed
    assert len(calls(gm, BMM)) == 6
    assert all(size % 8 == 0 for size in rows(gm))
    # k, v and p, each once for the two products that read it; the gradient of the scores is computed padded
    assert [len(node.users) for node in calls(gm, PAD) if len(node.args[1]) == 4] == [2, 2, 2]


def test_heads_are_padded_behind_their_views() -> None:
    """Where (batch, heads, ...) become one axis and k is transposed: before both, so that nothing is copied for it."""

    def step(q: Tensor, k: Tensor) -> Tensor:
        return (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)).exp()

    shape = 2, TOKENS, 3, WIDTH
    gm, changed = padded(step, draw(*shape), draw(*shape))
    assert changed
    assert all(size % 8 == 0 for size in rows(gm))


def test_a_softmax_that_is_saved_is_rounded_before_it_is_padded() -> None:
    """Inductor writes it; without a sum it is padded as it is computed."""

    def step(s: Tensor, v: Tensor) -> list[Tensor]:
        e = s.float().exp()
        p = (e / e.sum(-1, keepdim=True)).bfloat16()
        return [(p @ v) * 2, p, (s.exp() @ v) * 2]

    gm, _ = padded(step, draw(BATCH, TOKENS, TOKENS), draw(BATCH, TOKENS, WIDTH))
    pads = [node for node in calls(gm, PAD) if node.args[0].op != "placeholder"]
    assert [WRITTEN in node.args[0].meta for node in pads] == [True, False]


def softmax(s: Tensor) -> Tensor:
    e = (s - s.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


ROWS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "softmax": lambda q, k, b: [softmax((q @ k.mT).float()).bfloat16() @ k * 2],
    "a bias of each head, and a mask of -inf": lambda q, k, b: [
        (softmax((q @ k.mT).view(2, 3, TOKENS, TOKENS).float() + b.where(b > -1, -torch.inf)).bfloat16().flatten(0, 1))
        @ k
        * 2
    ],
    "scores far below 0, whose exponential beside a 0 is infinite": lambda q, k, b: [
        softmax((q @ k.mT).float() - 1e4).bfloat16() @ k * 2
    ],
    "two products, and a sum over heads": lambda q, k, b: [
        (p := softmax((q @ k.mT).float() + b).bfloat16()) @ k * 2,
        p.mT @ q * 2,
        p.view(2, 3, TOKENS, TOKENS).sum(0).exp(),
    ],
    "of scores that are saved": lambda q, k, b: [s := torch.bmm(q, k.mT), softmax(s.float()).bfloat16() @ k * 2],
    "two softmaxes of one sum": lambda q, k, b: [
        ((e := (q @ k.mT).float().exp()) / (t := e.sum(-1, keepdim=True))).bfloat16() @ k * 2,
        (e.square() / t).bfloat16() @ q * 2,
    ],
    "its gradient": lambda q, k, b: [
        (g := (((p := softmax(b + q[..., :1].float())) * (t := (q @ k.mT).float())) - p * (p * t).sum(-1, True))
        .bfloat16()) @ k * 2,
        g.mT @ q * 2,
        g.float().sum(0) * 2,
    ],
    "sums without their axis, in another dtype": lambda q, k, b: [
        ((e := (q @ k.mT).exp()) / e.sum(-1, dtype=torch.float32).unsqueeze(-1)).bfloat16() @ k * 2
    ],
    "a mask behind it": lambda q, k, b: [
        softmax((q @ k.mT).float()).where((b > 0).expand(BATCH, -1, -1), 0).bfloat16() @ k * 2
    ],
    "a count": lambda q, k, b: [((s := (q @ k.mT).float()) / (1 + (s > 0).sum(-1, True))).bfloat16() @ k * 2],
    "sums over other axes": lambda q, k, b: [((s := (q @ k.mT).float().exp()) / s.sum(1, True)).bfloat16() @ k * 2],
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_sums_of_rows_are_over_padded_ones(name: str) -> None:
    """One kernel has a softmax's sums and writes it padded: nothing is padded behind a formula with a sum."""
    torch.manual_seed(zlib.crc32(name.encode()))
    gm, changed = padded(
        ROWS[name], draw(BATCH, TOKENS, WIDTH), draw(BATCH, TOKENS, WIDTH), torch.randn(TOKENS, TOKENS)
    )
    assert changed
    assert all(size % 8 == 0 for size in rows(gm))
    sums = [node for kind in padding._SUMS for node in calls(gm, kind) if node.args[1] == [-1]]
    whole = BATCH * TOKENS * TOKENS  # elements: what is repeated has fewer
    pads = [node for node in calls(gm, PAD) if node.args[0].meta["val"].numel() == whole]
    written = [node for node in pads if node.args[0].meta.get(WRITTEN)]
    if name in ("a count", "sums over other axes"):
        assert written
    else:
        assert not written
        assert all(node.args[0].meta["val"].shape[-1] == 56 for node in sums)


@pytest.mark.parametrize("masked", [False, True])
def test_codes_of_a_softmax_are_of_its_padded_rows(masked: bool) -> None:
    """One kernel writes a softmax and its codes: both have rows of 56, and nothing is padded behind their sums. What
    windows repeat, a mask that is computed, is written once, and padded as it is read."""

    def step(q: Tensor, k: Tensor, b: Tensor) -> list[Tensor]:
        scores = (q @ k.mT).float()
        if masked:
            mask = b.ne(0).to(torch.float32).masked_fill(b > 1, -100.0)
            scores = (scores.view(2, 3, TOKENS, TOKENS) + mask.unsqueeze(0)).view(BATCH, TOKENS, TOKENS)
        p = softmax(scores)
        return [p.bfloat16() @ k * 2, *GROUPED["log8/row"].keep(p)]

    inputs = draw(BATCH, TOKENS, WIDTH), draw(BATCH, TOKENS, WIDTH), torch.randn(3, TOKENS, TOKENS)
    gm, changed = padded(step, *inputs)
    assert changed
    sums = [node for kind in padding._SUMS for node in calls(gm, kind) if node.args[1] == [-1]]
    assert len(sums) == 3
    assert all(node.args[0].meta["val"].shape[-1] == 56 for node in sums)
    behind = [node for node in calls(gm, PAD) if node.args[0].op != "placeholder"]
    of_the_mask = [node for node in behind if node.args[0].meta.get(WRITTEN)]
    assert behind == of_the_mask
    assert [node.args[0].meta["val"].numel() for node in of_the_mask] == [3 * TOKENS * TOKENS] * masked


def test_a_mask_may_be_in_memory_with_other_strides() -> None:
    """Inductor pads the strides of what it writes, of what forward saves for backward as well, and no value in a graph
    says so: what is padded is read by its sizes, not by places in memory."""

    def step(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        scores = (q @ k.mT).float().view(2, 3, TOKENS, TOKENS) + mask.unsqueeze(0)
        return softmax(scores).bfloat16().flatten(0, 1) @ k * 2

    q, k, mask = draw(BATCH, TOKENS, WIDTH), draw(BATCH, TOKENS, WIDTH), torch.randn(3, TOKENS, TOKENS)
    gm, changed = padded(step, q, k, mask)
    assert changed
    apart = torch.full((3, 2432), torch.nan).as_strided(mask.shape, (2432, TOKENS, 1)).copy_(mask)
    got, want = torch._inductor.compile(gm, [q, k, apart])(q, k, apart), step(q, k, mask)
    torch.testing.assert_close(got, want, rtol=CLOSE, atol=CLOSE * want.abs().max().item())


def test_what_reads_a_softmax_keeps_its_layout() -> None:
    """One whose rows are not side by side is padded behind itself: a view of what is computed of it relies on that."""

    def step(s: Tensor, v: Tensor) -> list[Tensor]:
        p = softmax((s * 1).transpose(0, 1)).bfloat16()
        return [p @ v * 2, (p * 2).transpose(0, 1).view(TOKENS, -1) * 2, p * 2]

    gm, changed = padded(step, torch.randn(TOKENS, BATCH, TOKENS), draw(BATCH, TOKENS, WIDTH))
    assert changed
    assert any(WRITTEN in node.args[0].meta for node in calls(gm, PAD))


def test_an_integer_that_may_change_is_no_row() -> None:
    """A number of heads that differs between blocks becomes symbolic in a graph of static tensors."""
    graph = torch.fx.Graph()
    number, mode = graph.placeholder("n"), torch._subclasses.FakeTensorMode()
    number.meta["val"] = torch.SymInt(None)  # has no shape
    with mode:
        s = graph.placeholder("s")
        s.meta["val"] = torch.empty(TOKENS, TOKENS)
    assert [padding._row_of(node) for node in (number, s, 3)] == [None, TOKENS, None]


def test_a_long_formula_is_not_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could begin at the model's input."""
    monkeypatch.setattr(padding, "_LONGEST", 5)
    gm, changed = padded(ROWS["softmax"], *(draw(BATCH, TOKENS, WIDTH) for _ in range(2)), torch.zeros(1))
    assert changed
    assert any(WRITTEN in node.args[0].meta for node in calls(gm, PAD))


def test_a_copy_costs_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that are saved are written once more: 0.05 ms are less than that takes, and enough where none are."""
    monkeypatch.setattr(padding, "_times", lambda operands: (0.05, 0.0))
    inputs = draw(BATCH, TOKENS, WIDTH), draw(BATCH, TOKENS, WIDTH)
    roofs = Roofs(BATCH * TOKENS * TOKENS * 2 / 1e-4, 1e14)  # one pass over the scores takes 0.1 ms

    def step(q: Tensor, k: Tensor) -> list[Tensor]:
        s = torch.bmm(q * 2, (k * 2).mT)
        return [s.exp(), s.sin()]

    def saving(q: Tensor, k: Tensor) -> list[Tensor]:
        s = torch.bmm(q * 2, (k * 2).mT)
        return [s.exp(), s]

    assert [padded(one, *inputs, roofs=roofs)[1] for one in (step, saving)] == [True, False]


def test_a_result_that_others_hold_has_its_layout() -> None:
    """As the graph's result, and for what no formula is; a formula reads the slice as it is."""

    def step(q: Tensor, k: Tensor) -> list[Tensor]:
        s = torch.bmm(q, k.mT)
        return [s, torch.cumsum(s, 1), s.exp()]

    gm, _ = padded(step, draw(BATCH, TOKENS, WIDTH), draw(BATCH, TOKENS, WIDTH))
    (copy,) = calls(gm, CLONE)
    assert copy.args[0].target is SLICE
    assert any(user.target is torch.ops.aten.exp.default for user in copy.args[0].users)


STEPS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a product of a product": lambda a, b: torch.bmm(torch.bmm(a, b), a) * 2,
    "a square": lambda a, b: (lambda s: torch.bmm(s, s) * 2)(torch.bmm(a, b)),
    "places in memory": lambda a, b: torch.bmm(a, b).as_strided((BATCH, TOKENS), (TOKENS**2, TOKENS + 1)) * 2,
    "other bits": lambda a, b: torch.bmm(a, b).view(torch.int16) * 1,
    "all of a sample": lambda a, b: torch.bmm(a, b).view(BATCH, -1) * 2,
    "heads before tokens": lambda a, b: (
        torch.bmm((a.view(2, 3, TOKENS, WIDTH).permute(1, 2, 0, 3) * 2).permute(2, 0, 1, 3).reshape(a.shape), b) * 2
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_what_reads_a_product(name: str) -> None:
    """Views by sizes and by places, and products, which need the whole one; and operands of no usual strides."""
    assert padded(STEPS[name], draw(BATCH, TOKENS, WIDTH), draw(BATCH, WIDTH, TOKENS))[1]


def test_a_view_that_a_padded_tensor_does_not_have() -> None:
    """A formula keeps the strides of its operand, (heads, batch) in memory, padding does not: it is padded behind."""

    def step(a: Tensor, b: Tensor) -> Tensor:
        return torch.bmm((a.transpose(0, 1) * 2).transpose(0, 1).reshape(BATCH, WIDTH, TOKENS).mT, b) * 2

    assert padded(step, draw(3, 2, WIDTH, TOKENS), draw(BATCH, WIDTH, TOKENS))[1]


CASES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], torch.dtype]] = {
    "whole rows": (lambda a, b: a @ b.mT, (BATCH, 48, WIDTH), torch.bfloat16),
    "float32": (lambda a, b: a @ b.mT, (BATCH, TOKENS, WIDTH), torch.float32),
    "twice as many": (lambda a, b: a @ b.mT, (BATCH, 9, WIDTH), torch.bfloat16),
    "no rows at all": (lambda a, b: a[:, ::2, ::2] @ b.mT[:, ::2], (BATCH, TOKENS, WIDTH), torch.bfloat16),
}


@pytest.mark.parametrize("name", CASES)
def test_others_stay(name: str) -> None:
    step, shape, dtype = CASES[name]
    gm, changed = padded(step, draw(*shape, dtype=dtype), draw(*shape, dtype=dtype))
    assert not changed
    assert not calls(gm, SLICE) or name == "no rows at all"


@pytest.mark.parametrize("times", [(1.0, 1.0), (1.0, 0.9), None])
def test_what_is_not_faster_stays(times: tuple[float, float] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing was measured, too; the 0.1 ms are less than what it takes to write a padded softmax."""
    monkeypatch.setattr(padding, "_times", lambda operands: times)

    def step(s: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(s, -1) @ v

    inputs = draw(BATCH, TOKENS, TOKENS), draw(BATCH, TOKENS, WIDTH)
    assert not padded(step, *inputs, roofs=Roofs(1e8, 1e14))[1]
    assert not padded(step, *inputs, roofs=None)[1]


@pytest.mark.parametrize(("times", "wanted"), [((1.0, 0.25), 1.5), ((0.25, 1.0), 0.0), (None, 0.0)])
def test_what_a_step_gains(times: tuple[float, float] | None, wanted: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each product with such rows what it is faster; nothing of those that stay as they are."""
    monkeypatch.setattr(padding, "_times", lambda operands: times)

    def step(q: Tensor, k: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT, -1) @ k @ torch.ones(BATCH, WIDTH, WIDTH, dtype=q.dtype)

    gm = make_fx(step, tracing_mode="fake")(draw(BATCH, TOKENS, WIDTH), draw(BATCH, TOKENS, WIDTH))
    assert padding.gain(gm.graph, Roofs(1e30, 1e14)) == pytest.approx(wanted)


class Attention(nn.Module):
    """Of windows, as Swin has it, with scores of heads that are mixed before and behind softmax, as CaiT's."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.qkv, self.norm, self.proj = nn.Linear(64, 192), nn.LayerNorm(64), nn.Linear(64, 64)
        self.bias, self.mix = nn.Parameter(torch.randn(2, TOKENS, TOKENS)), nn.Linear(2, 2) if mixes else None

    def mixed(self, s: Tensor) -> Tensor:
        return s if self.mix is None else self.mix(s.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, 32).permute(2, 0, 3, 1, 4).unbind(0)
        p = self.mixed((self.mixed(q @ k.mT) + self.bias).softmax(-1))
        return x + self.proj((p @ v).transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize("mixes", [False, True])
def test_a_compiled_block(mixes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With codes of what forward saves: result and gradients are those of the same graphs without padding."""
    monkeypatch.setattr(compiled, "_device_roofs", lambda gm: ROOFS)
    found, changed, pad = [], [], padding.pad
    monkeypatch.setattr(padding, "pad", lambda *args: changed.append(pad(*args)) or changed[-1])
    x = torch.randn(32, TOKENS, 64)
    for times in (None, (1.0, 0.0)):
        padding._measured.clear()
        monkeypatch.setattr(padding, "_times", lambda operands, times=times: times)
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Attention(mixes)
        hotrain.convert(model, "exact", memory="block")
        caches = torch._inductor.config.patch(fx_graph_cache=False)
        with caches, torch._functorch.config.patch(enable_autograd_cache=False):
            with torch.autocast("cpu", torch.bfloat16):
                y = torch.compile(model)(x)
            y.square().mean().backward()
        found.append([y.detach(), *(p.grad for p in model.parameters())])
    assert changed == [False, False, True, True]
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= CLOSE * other.norm()

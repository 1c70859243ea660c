"""What the report of a conversion says is kept is what is alive between forward and backward: twelve models."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.utils import fresh_inductor_cache
from zoo import SWIN, Entry, call, timm_model

import hotrain
import hotrain.compiling
from hotrain import private
from hotrain.audit.saved_bytes import counting
from hotrain.compress.compiled import partition


def _wide(entry: Entry, batch: int) -> Entry:
    """The entry with so many samples that most tensors are large enough to be compressed."""

    def inputs() -> Tensor | dict[str, Tensor]:
        made = entry.inputs()
        if isinstance(made, dict):
            return {name: t.repeat(batch // len(t), *[1] * (t.dim() - 1)) for name, t in made.items()}
        return torch.randn(batch, *made.shape[1:])

    return Entry(entry.build, inputs)


def _hf(kind: str, **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        models = {
            "bert": (transformers.BertConfig, transformers.BertForSequenceClassification),
            "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
            "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
            "vit": (transformers.ViTConfig, transformers.ViTForImageClassification),
            "segformer": (transformers.SegformerConfig, transformers.SegformerForImageClassification),
        }
        config, model = models[kind]
        return model(config(**sizes))

    return build


def _ids() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 50, (8, 64))}


def _pixels() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(8, 3, 64, 64)}


_BERT = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
_LLAMA = {**_BERT, "num_key_value_heads": 1, "vocab_size": 60}
_SEGFORMER = {
    "depths": [1, 1], "num_encoder_blocks": 2, "hidden_sizes": [32, 64], "sr_ratios": [2, 1], "patch_sizes": [7, 3],
    "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 32,
}  # fmt: skip

MODELS: dict[str, Entry] = {
    "vit": _wide(timm_model("vit_tiny_patch16_224", 64, img_size=64, patch_size=8, depth=1), 8),
    "deit": _wide(timm_model("deit_tiny_patch16_224", 64, img_size=64, patch_size=8, depth=1), 8),
    "swin": _wide(timm_model("swin_tiny_patch4_window7_224", 56, img_size=56, **SWIN), 8),
    "resnet": _wide(timm_model("resnet18", 64, layers=(1, 1, 1, 1)), 8),
    "convnext": _wide(timm_model("convnext_atto", 64, depths=(1, 1, 1, 1)), 8),
    "efficientnet": _wide(timm_model("test_efficientnet", 64), 8),
    "mobilenet": _wide(timm_model("mobilenetv3_small_050", 64, depth_multiplier=0.5), 8),
    "bert": Entry(_hf("bert", vocab_size=50, hidden_dropout_prob=0.0, **_BERT), _ids),
    "gpt2": Entry(_hf("gpt2", vocab_size=60, n_positions=64, n_embd=64, n_layer=1, n_head=2), _ids),
    "llama": Entry(_hf("llama", **_LLAMA), _ids),
    "hf_vit": Entry(_hf("vit", image_size=64, patch_size=8, **_BERT), _pixels),
    "segformer": Entry(_hf("segformer", **_SEGFORMER), _pixels),
}  # fmt: skip


def _step(model: Any, inputs: Tensor | dict[str, Tensor]) -> None:
    call(model, inputs).float().square().mean().backward()


@pytest.mark.parametrize("name", MODELS)
def test_eager(name: str) -> None:
    entry = MODELS[name]
    torch.manual_seed(0)
    model = entry.build()
    inputs = entry.inputs()
    exact = copy.deepcopy(model)
    report = hotrain.convert(model)
    _step(model, inputs)
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})
    alive = hotrain.saved_bytes(model, *args, **kwargs)
    own: Counter[str] = Counter()
    for row in alive.rows:
        if row["operator"] in ("hotrain linear", "hotrain conv2d"):
            own[row["module"]] += row["bytes"]
    said = {row.name: row.saved_bytes for row in report.converted}
    assert said, "nothing was converted"
    assert {layer: own[layer] for layer in said} == said
    assert report.totals() == (alive.total, hotrain.saved_bytes(exact.train(), *args, **kwargs).total)
    assert sum(group["bytes"] or 0 for group in report.ran()) == sum(said.values())


def _kept(run: Any, model: nn.Module, inputs: Tensor | dict[str, Tensor]) -> list[tuple[str, int]]:
    """(dtype, bytes) of each storage that the compiled forward gives to its backward, without what lives anyway."""
    histories = [state.draws.history for _, _, state in hotrain.converted_layers(model)]
    tags = [None if history is None else history.words for history in histories]
    held = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *tags) if t is not None}
    found: dict[int, tuple[str, int]] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in held:
            found[storage.data_ptr()] = str(t.dtype).removeprefix("torch."), storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = call(run, inputs)
    sizes = list(found.values())
    del y
    return sizes


def _nothing(graph: torch.fx.GraphModule, _: Any) -> Any:
    return make_boxed_func(graph.forward)


# Among these are the operators of the others, and of `test_compressed_models`' compiled ones.
COMPILED = ["vit", "swin", "resnet", "efficientnet", "bert", "gpt2", "llama", "segformer"]


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name: str) -> None:
    """A compiled step's operators write down what they do while they run, and the cut of the graph what crosses."""
    entry = MODELS[name]
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = entry.build()
    inputs = entry.inputs()
    report = hotrain.convert(model)
    backend = aot_autograd(fw_compiler=_nothing, bw_compiler=_nothing, partition_fn=partition)
    run = torch.compile(model, backend=backend)
    _step(run, inputs)
    alive = Counter(_kept(run, model, inputs))
    said = Counter(kept for row in report.converted for kept in row.saved)
    assert report.converted
    assert said <= alive, f"said to be kept, but not alive: {said - alive}"
    assert report.buffers is not None
    assert len(report.buffers.graphs) == 1
    assert report.buffers.graphs[0] == sum(size * count for (_, size), count in alive.items())


# kernel, groups, method → what the report says of g_x and of g_w
PRODUCTS: list[tuple[str, int, int, str, str, str]] = [
    ("1×1: a Linear layer on positions", 1, 1, "hq8", "H16·int8/token", "H16·int8/column"),
    ("3×3: x at its own positions", 3, 1, "hq8", "H16·int8/token", "int8/column of x restored from H16"),
    ("3×3, half of the rows", 3, 1, "hla", "exact", "exact of x restored from P8of16"),
    ("depthwise: no block for H", 3, 32, "hq8", "exact", "exact of x restored from H16"),
    ("groups of a block", 3, 2, "hq8", "H16·int8/token", "int8/column of x restored from H16"),
    ("no rotation, so codes in small groups too", 3, 32, "int4", "int4/tensor", "int4"),
]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("_", "kernel", "groups", "method", "g_x", "g_w"), PRODUCTS, ids=[row[0] for row in PRODUCTS])
def test_what_is_multiplied(_: str, kernel: int, groups: int, method: str, g_x: str, g_w: str, compiled: bool) -> None:
    """A gradient that is said to be exact is that of PyTorch, one that is said to be of codes is not."""
    torch._dynamo.reset()
    exact = nn.Sequential(nn.Conv2d(32, 32, kernel, padding=kernel // 2, groups=groups, bias=False))
    model = copy.deepcopy(exact)
    report = hotrain.convert(model, method, filter_fn=lambda *_: True, plan="memory", memory="linear")
    x = torch.randn(2, 32, 16, 16)
    grads = []
    for each in (exact, model):
        run = torch.compile(each, backend="aot_eager") if compiled and each is model else each
        own = x.clone().requires_grad_()
        run(own).square().sum().backward()
        grads.append(own.grad)
    (row,) = report.ran()
    assert (row["g_x"], row["g_w"]) == (g_x, g_w)
    assert f"g_x {g_x}, g_w {g_w}, " in str(report), "in the summary as well"
    # The sums of a transposed convolution are ordered as PyTorch's own; codes of 8 bits are off by 1 % of the norm.
    error = float((grads[0] - grads[1]).norm() / grads[0].norm())
    assert error < 1e-6 if g_x == "exact" else error > 1e-3


def test_a_frozen_layer_without_a_gradient_says_so() -> None:
    """Below the first trained layer nothing is computed by the method; above it, g_x is."""
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)).train()
    net[0].requires_grad_(False)
    net[2].requires_grad_(False)
    report = hotrain.convert(net)
    assert "no gradient" not in str(report), "before the first step it is not known"
    net(torch.randn(8, 16, 64)).sum().backward()
    first, _, last = report.converted
    assert str(first) == "hq8  no gradient was asked of it"
    assert "none: the weight is frozen" in str(last)


@pytest.mark.parametrize("compiles", [False, True])
def test_a_layer_that_is_frozen_after_a_step_says_so(compiles: bool) -> None:
    """Its record of the step before is not that of the last; trained again, it has one. Evaluation is no step."""
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).train()
    report = hotrain.convert(net, "hq8")
    run = torch.compile(net, backend="aot_eager") if compiles else net
    rows = []
    for trained in (True, False, True):
        net[0].requires_grad_(trained)
        run(torch.randn(8, 16, 64)).sum().backward()
        with torch.no_grad():
            run(torch.randn(8, 16, 64))
        rows.append(str(report.converted[0]))
    assert rows[0] == rows[2] != rows[1] == "hq8  no gradient was asked of it"
    assert "8.01 KiB" in rows[0]


# ---- the bytes of the whole model ----


def test_the_total_is_that_of_the_model_as_it_is_trained_now() -> None:
    """A linear probe, then all of it, then with a block replaced; in evaluation mode as it was trained last."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(512, 64)
    report = hotrain.convert(model, memory="block")

    def agrees() -> int:
        model(x).sum().backward()
        totals = report.totals()
        assert totals is not None
        assert totals[0] == hotrain.saved_bytes(model, x).total
        return totals[0]

    model[:3].requires_grad_(False)
    probe = agrees()
    model.requires_grad_(True)
    assert agrees() > 2 * probe
    model[2] = nn.Identity()
    smaller = agrees()
    model.eval()
    model.requires_grad_(False)
    totals = report.totals()
    assert totals is not None
    assert totals[0] == smaller


def test_a_graph_of_another_batch_is_not_added() -> None:
    """The last batch of an epoch is smaller, and compiled anew."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False):
        fast = hotrain.compile(model, memory="block")
        for rows in (512, 512, 384):
            fast(torch.randn(rows, 64)).sum().backward()
    assert fast.report.buffers is not None
    assert len(fast.report.buffers.graphs) == 2
    totals = fast.report.totals()
    assert totals is not None
    assert totals[0] == fast.report.buffers.graphs[0]


def test_what_torch_compile_keeps_is_told_without_exact_s() -> None:
    """Its first call is nobody's to see. Of one graph that the pass has cut the bytes are known, of others nothing."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(512, 64)
    torch._dynamo.reset()
    report = hotrain.convert(model)
    assert "kept for backward" not in str(report)
    fast = torch.compile(model, backend="aot_eager")
    fast(x).sum().backward()
    assert "kept for backward: not known of the graphs of torch.compile; hotrain.compile(model) in" in str(report)
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=_nothing, bw_compiler=_nothing, partition_fn=partition)
    fast = torch.compile(model, backend=backend)
    fast(x).sum().backward()
    kept = hotrain.saved_bytes(fast, x).total
    assert f"kept for backward: {kept / 1024:.2f} KiB, by the graph of torch.compile; hotrain.compile(mo" in str(report)


def _small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64))


def test_graphs_of_a_cache_are_read_off_the_first_step() -> None:
    """A script that runs again compiles nothing, and its report has the same total."""
    x, found = torch.randn(512, 64), []
    with fresh_inductor_cache(), torch._functorch.config.patch(enable_autograd_cache=True):
        for _ in range(2):
            torch._dynamo.reset()
            fast = hotrain.compile(_small())
            for batch in (x, x, x[:384]):  # a second graph is not of the first step
                fast(batch).sum().backward()
            found.append((fast.report.buffers.uncut, fast.report.totals()))
    (was_cut, *total), (is_uncut, *other) = found
    assert not was_cut
    assert is_uncut, "nothing was cached, so that this tests nothing"
    assert total == other
    assert total[0][0] == hotrain.saved_bytes(fast, x).total


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """`hotrain.compile` without Inductor."""
    monkeypatch.setattr(hotrain.compiling, "compile_in_mode", lambda m, _: torch.compile(m, backend="aot_eager"))
    torch._dynamo.reset()


class _Unusual(nn.Module):
    """A forward that computes a part again in the backward pass, has saved tensors elsewhere, which are there once,
    writes to its input, and keeps a loss beside its result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.runs, self.elsewhere = nn.Linear(64, 64), 0, dict[int, Tensor]()

    def block(self, x: Tensor) -> Tensor:
        self.runs += 1
        return F.dropout(self.linear(x).sigmoid())

    def pack(self, t: Tensor) -> int:
        self.elsewhere[len(self.elsewhere)] = t
        return len(self.elsewhere) - 1

    def forward(self, x: Tensor) -> Tensor:
        y = torch.utils.checkpoint.checkpoint(self.block, x.clone(), use_reentrant=False)
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.elsewhere.pop):
            y = y.sigmoid()
        self.auxiliary = y.exp().sum()
        x += y
        return x


def test_counting_changes_nothing_of_a_step() -> None:
    """Nothing is computed or unpacked for it: a checkpoint would run again, and what hooks have may be there once."""
    model, x = _Unusual(), torch.randn(512, 64)
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    other(x.clone()).sum().backward()
    torch.manual_seed(1)
    with counting(model) as kept:
        y = model(x.clone())
    before = kept()
    assert model.runs == 1
    y.sum().backward()
    assert model.runs == other.runs == 2, "again for the backward pass, and for nothing else"
    assert torch.equal(model.linear.weight.grad, other.linear.weight.grad)
    del y
    assert before == hotrain.saved_bytes(model, x.clone()).total, "with the auxiliary loss's, behind no result"
    left = kept()
    assert left is not None
    assert left < before, "what backward has freed is not kept alive"


def test_a_step_that_is_counted_is_differentiated_twice() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(512, 64, requires_grad=True)

    def penalty(y: Tensor) -> list[Tensor]:
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return [g, *torch.autograd.grad(g.square().sum(), [model[0].weight, model[2].weight, x])]

    with counting(model):
        y = model(x)
    assert all(map(torch.equal, penalty(y), penalty(model(x))))


def test_within_hooks_nothing_is_counted() -> None:
    """What the outer ones pack is elsewhere: a checkpoint of the whole model keeps nothing of it."""
    model, x = _small(), torch.randn(512, 64)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), counting(model) as kept:
        model(x)
    assert kept() is None
    with torch.autograd.graph.disable_saved_tensors_hooks("not allowed here"), counting(model) as kept:
        model(x)
    assert kept() is None


def test_an_interrupted_first_step_leaves_no_hooks() -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    model, x = _small(), torch.randn(512, 64)
    fast = hotrain.compile(model)
    with torch.compiler.set_stance("force_eager"):
        handle = model.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            fast(x)
        handle.remove()
        assert private.saved_tensor_hooks.innermost() == (None, True)
        fast(x).sum().backward()
        assert fast.report.totals()[0] == hotrain.saved_bytes(fast, x).total


def test_a_compiled_model_is_differentiated_by_transforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first training step, too: that is no step to record."""
    monkeypatch.setattr(hotrain.compiling, "compile_in_mode", lambda m, _: torch.compile(m, backend="eager"))
    fast, x = hotrain.compile(_small()), torch.randn(512, 64)
    assert torch.func.grad(lambda x: fast(x).sum())(x).shape == x.shape
    assert fast.report.totals() is None


class _InTwo(nn.Module):
    """A model that is compiled in two parts."""

    def __init__(self, other: bool = False) -> None:
        super().__init__()
        self.one, self.two = _small(), nn.Sequential(nn.Linear(64, 64), nn.SiLU()) if other else _small()

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        torch._dynamo.graph_break()
        return self.two(h)


@pytest.mark.usefixtures("quickly")
def test_the_total_is_of_the_first_step_that_ran() -> None:
    """Of all its parts: also where an earlier call has raised, and where Dynamo has graphs of another model."""
    x = torch.randn(512, 64)
    for model in (_small(), _small(), _InTwo(), _InTwo(other=True)):
        fast = hotrain.compile(model)
        with pytest.raises((RuntimeError, ValueError)):
            fast(torch.randn(7, 63))
        for batch in (x, x, x[:384]):
            fast(batch).sum().backward()
        totals = fast.report.totals()
        assert totals is not None
        assert totals[0] == hotrain.saved_bytes(fast, x).total
        assert "of the first batch (512×64)" in str(fast.report)
    torch._dynamo.reset()  # code that has raised is not compiled any more
    for _ in range(2):
        fast = hotrain.compile(_small())
        fast(x).sum().backward()
        assert "so that which operator keeps what is unknown" in str(fast.report)


class _OfValues(nn.Module):
    """A model that looks at values, of which shapes do not tell what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _small()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if x.sum().item() > -1e9 else x


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo asks an input that was computed for it
@pytest.mark.usefixtures("quickly")
def test_what_was_measured_is_told_where_exact_s_is_not_known() -> None:
    fast, x = hotrain.compile(_OfValues()), torch.randn(512, 64)
    fast(x).sum().backward()
    kept = hotrain.saved_bytes(fast, x).total
    assert f"kept for backward: {kept / 1024:.2f} KiB; exact's is not known from shapes; hotrain" in str(fast.report)


@pytest.mark.usefixtures("quickly")
def test_a_report_that_was_sent_elsewhere_has_what_was_measured() -> None:
    fast, x = hotrain.compile(_small()), torch.randn(512, 64)
    fast(x).sum().backward()
    kept = hotrain.saved_bytes(fast, x).total
    there = pickle.loads(pickle.dumps(fast.report))
    assert f"kept for backward: {kept / 1024:.2f} KiB; exact's is not known, the model is gone" in str(there)


class Yields(nn.Module):
    """A forward that is a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Any:
        yield self.second(nn.functional.silu(self.first(x)))


def test_what_a_generator_runs_is_not_said_to_be_small() -> None:
    """Its body runs behind forward: the report called tensors of 32,768 entries too small to compress."""
    model = Yields()
    report = hotrain.convert(model)
    sum(y.square().sum() for y in model(torch.randn(8, 64, 64))).backward()
    assert "what no block calls  kept in full precision: forward is a generator" in str(report)
    assert "as exact keeps it" not in str(report)


def test_what_did_not_run_is_said_to_be_planned() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(512, 64)
    report = hotrain.convert(model)
    model.eval()
    model(x).sum().backward()
    assert "planned (in evaluation mode layers are exact)" in str(report)
    model[0].train()
    model(x).sum().backward()
    assert "planned" not in str(report)
    assert [(row.name, "evaluation mode" in row.reason) for row in report.kept] == [("1", True)]


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.GRU(64, 64, batch_first=True), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(2 * x)[0])  # type: ignore[no-any-return]


class _Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        f = torch.fft.rfft2(self.inner(x))
        return self.head(torch.fft.irfft2(f * f.abs(), s=x.shape[1:]))  # type: ignore[no-any-return]


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        padding, causal = torch.zeros(8, 64, dtype=torch.bool), torch.ones(64, 64, dtype=torch.bool).triu(1)
        return self.inner(x, x, x, padding, need_weights=False, attn_mask=causal)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "what", "least"),
    [
        (_Recurrent, "gru", 0.8),  # small tensors of each step: 64 × 8 × 64 of several gates
        (_Spectral, "mul", 8 * 64 * 33 * 8 / 2**20 - 0.05),  # of complex numbers
        (_Masked, "attention mask", 8 * 4 * 64 * 64 * 4 / 2**20 - 0.05),
    ],
    ids=["tensors of each step of an RNN", "complex numbers", "a mask of numbers"],
)
def test_what_is_kept_in_full_is_named_with_its_bytes(model: type[nn.Module], what: str, least: float) -> None:
    """Also where no single tensor is large, or none is real."""
    net = model()
    report = hotrain.convert(net, "exact", memory="block", plan="memory")
    net(torch.randn(8, 64, 64)).sum().backward()
    (row,) = (row for row in str(report).splitlines() if row.strip().startswith(f"{what} ") and "MiB" in row)
    assert float(row.partition("precision: ")[2].partition(" MiB")[0]) >= least


def test_a_report_of_a_model_that_is_exact_again_says_so() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 64))
    report = hotrain.convert(net, "exact", memory="block", plan="memory")
    net(torch.randn(8, 64, 64)).sum().backward()
    assert "softplus" in str(report)
    hotrain.revert(net[0])
    assert "softplus" in str(report), "a part of it"
    hotrain.revert(net)
    assert "softplus" not in str(report)
    assert "as exact keeps it" in str(report)

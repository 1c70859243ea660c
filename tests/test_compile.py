"""`torch.compile` of a converted model: one graph in training too, compiled once, with the uncompiled numbers.

Most tests use the backend that runs a traced graph as it is ("aot_eager"): differentiation, functionalization and the
partition into forward and backward are those of every backend. Its gradients differ from the uncompiled ones by how
float32 sums of a backward pass are ordered: a few 1e-7 of a gradient's size, to which a rounding that this flips adds
a step of one entry. The bound is 1e-3; draws of another step would give an error of the method's noise, near 1.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import hotrain
from hotrain import draws
from hotrain.nn import layer_state
from hotrain.nn.state import LayerState

CLOSE = 1e-3

# the compiler's own look at a tensor between two graphs
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Nothing compiled before, and no second compilation of anything unless a test allows it."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


class Net(nn.Module):
    """A patch embedding, a k×k convolution, a ReLU that keeps bits, and two Linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mix, self.act = nn.Conv2d(3, 32, 4, 4), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()
        self.fc1, self.fc2 = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        t = self.act(self.mix(self.conv(x))).flatten(2).mT
        return t + self.fc2(nn.functional.gelu(self.fc1(t)))


IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))

Run = Callable[[], Tensor]


def gradients(model: nn.Module, run: Run, count: int = 4, seed: int = 1) -> list[list[Tensor]]:
    """The parameters' gradients of each of `count` steps."""
    hotrain.manual_seed(seed)
    seen = []
    for _ in range(count):
        model.zero_grad()
        run().backward()
        seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    return seen


def error(got: list[Tensor], want: list[Tensor]) -> float:
    """The largest distance of a gradient, over its size."""
    return max(float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in zip(got, want, strict=True))


def assert_close(got: list[list[Tensor]], want: list[list[Tensor]]) -> None:
    assert [error(a, b) < CLOSE for a, b in zip(got, want, strict=True)] == [True] * len(want)


def compiled(model: Callable[..., Any], backend: str = "aot_eager") -> Callable[..., Any]:
    return torch.compile(model, backend=backend, fullgraph=True)


def squares(y: Tensor) -> Tensor:
    return y.float().square().mean()


@pytest.mark.parametrize("method", ["hot-unbiased", "hot", "hla", "hq4", "lbp-wht", "luq", "dropout"])
def test_one_graph_follows_the_method_step_by_step(method: str) -> None:
    """Every kind of layer. Draws advance (they are no constants of the graph), and ten steps compile nothing anew:
    two more than would exhaust the compiler's patience, if it were tried."""
    model = Net()
    hotrain.convert(model, method, filter_fn=lambda module, name: True)
    want = gradients(model, lambda: squares(model(IMAGES)), 10)
    run = compiled(model)
    got = gradients(model, lambda: squares(run(IMAGES)), 10)
    assert_close(got, want)
    if hotrain.preset(method).draws:
        assert error(got[0], got[1]) > 10 * CLOSE
        assert {state.draws.step for _, _, state in hotrain.converted_layers(model)} == {9}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_inductor_follows_the_method_too() -> None:
    """Its own fusion of what is between the layers moves last bits, and those a rounding here and there."""
    model = Net()
    hotrain.convert(model, "hot-unbiased", filter_fn=lambda module, name: True)
    want = gradients(model, lambda: squares(model(IMAGES)))
    run = compiled(model, "inductor")
    got = gradients(model, lambda: squares(run(IMAGES)))
    assert_close(got, want)
    again = gradients(model, lambda: squares(run(IMAGES)))
    assert [error(a, b) for a, b in zip(again, got, strict=True)] == [0.0] * 4


def vit(timm: ModuleType) -> tuple[nn.Module, Tensor]:
    return timm.create_model("test_vit", num_classes=10, img_size=96, depth=2), torch.randn(2, 3, 96, 96)


def llama(_: ModuleType) -> tuple[nn.Module, Tensor]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=100, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), torch.randint(0, 100, (2, 48))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "method"),
    [
        (vit, "hot-unbiased"),  # draws, and codes are kept
        (llama, "hot-unbiased"),
        (vit, "hla"),  # neither: no key is passed
        (llama, "hq4"),  # packed codes with a per-row scale
    ],
    ids=lambda v: v if isinstance(v, str) else v.__name__,
)
def test_whole_models_are_one_graph(make: Any, method: str, timm: ModuleType) -> None:
    """What each method computes is compared on small layers below and above; here, that nothing in a model stops it."""
    model, x = make(timm)
    model.train()
    assert len(hotrain.convert(model, method).converted) >= 7

    def loss(run: Callable[..., Any]) -> Tensor:
        y = run(x)
        return squares(y if isinstance(y, Tensor) else y.logits)

    want = gradients(model, lambda: loss(model), 2)
    run = compiled(model)
    assert_close(gradients(model, lambda: loss(run), 2), want)


def test_autocast_casts_outside_and_inside() -> None:
    """The context around the compiled call, as training loops have it: bf16 products, gradients of float32."""
    model = Net()
    hotrain.convert(model, "hot-unbiased", filter_fn=lambda module, name: True)
    run = compiled(model)

    def loss(call: Callable[..., Any]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = call(IMAGES)
            assert y.dtype == torch.bfloat16
        return squares(y)

    want = gradients(model, lambda: loss(model), 2)
    got = gradients(model, lambda: loss(run), 2)
    assert_close(got, want)
    assert {g.dtype for g in got[0]} == {torch.float32}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(64), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(self.norm(x))))


class Blocks(nn.Module):
    """Residual blocks; `context` None runs them plainly, () under checkpointing, a function with its policy."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: Tensor, context: Any = None) -> Tensor:
        for block in self.blocks:
            if context is None:
                x = x + block(x)
            else:
                kwargs = {"context_fn": context} if context else {}
                x = x + checkpoint(block, x, use_reentrant=False, **kwargs)
        return x


TOKENS = torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(3))


def saving(*operators: Any) -> Any:
    """Selective checkpointing that saves what these operators return."""

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in operators else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


CHECKPOINTS = {
    "all": (),
    "but the products": saving(torch.ops.aten.mm.default, torch.ops.aten.addmm.default),
    "but the codes": saving(torch.ops.hotrain.keep.default),
}


@pytest.mark.filterwarnings("ignore:.*context_fn is passed:UserWarning")
@pytest.mark.parametrize("context", CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def test_checkpointing_inside_draws_the_same(context: Any) -> None:
    """Recomputed codes are those of the first forward: backward gets the key, not a counter that has moved on. Also
    of two forwards before two backwards, where the counter has moved on twice."""
    model = Blocks()
    hotrain.convert(model, "hot-unbiased")

    def two(call: Callable[..., Any], *args: Any) -> Tensor:
        first, second = call(TOKENS, *args), call(TOKENS + 1, *args)
        squares(first).backward()
        return squares(second)

    once = gradients(model, lambda: squares(model(TOKENS)), 2)
    twice = gradients(model, lambda: two(model), 2)
    run = compiled(functools.partial(model, context=context))
    assert_close(gradients(model, lambda: squares(run(TOKENS)), 2), once)
    assert_close(gradients(model, lambda: two(run), 2), twice)


def test_blocks_compiled_one_by_one_share_a_graph() -> None:
    """Regional compilation: nothing that a graph is guarded by tells one layer from another, nor one step from
    another; the layers keep draws of their own all the same."""
    model = Blocks(12)
    hotrain.convert(model, "hot-unbiased")
    x = TOKENS.clone().requires_grad_()
    want = gradients(model, lambda: squares(model(x)), 2)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    assert_close(gradients(model, lambda: squares(model(x)), 2), want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert {state.draws.step for _, _, state in hotrain.converted_layers(model)} == {1}


def test_the_report_knows_what_blocks_with_shared_code_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first block is traced. Where the plan left its layers exact, those of the others ran exact too, and none
    is reported as converted."""
    monkeypatch.setattr(LayerState, "_question", lambda *_: SimpleNamespace(multiplies=False))
    monkeypatch.setattr(LayerState, "_why_exact", lambda *_: "slower on this GPU")
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(3)))
    report = hotrain.convert(blocks)
    for block in blocks:
        block.compile(backend="aot_eager")
    blocks(TOKENS.new_ones(2, 48, 32).requires_grad_()).sum().backward()
    said = {row.name: row.reason for row in report.kept}
    assert report.converted == []
    assert said["0.0"] == "slower on this GPU"
    assert said["2.2"] == "as 0.2, whose compiled code it runs: slower on this GPU"
    assert [group["method"] for group in report.ran()] == ["exact"]


def checks(convert: bool, layers: int) -> list[str]:
    """What PyTorch checks before each call of a compiled model of so many layers."""
    torch._dynamo.reset()
    model = Blocks()
    model.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))
    if convert:
        hotrain.convert(model)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    run(TOKENS.new_ones(2, 48, 32).requires_grad_()).sum().backward()
    (entry,) = torch._dynamo.eval_frame._debug_get_cache_entry_list(type(model).forward.__code__)
    return [line for line in str(entry.guard_manager).splitlines() if "_modules['3']" in line]


def test_a_kept_layer_adds_few_checks_to_a_call_and_none_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a small model as CUDA graphs waits for the host: `hasattr` of a module alone took 3 µs a layer, and
    `tf_efficientnetv2_s` has 161. Some of an exact layer's checks are of its weight, and as many again are allowed."""
    monkeypatch.setattr(LayerState, "_why_exact", lambda *_: "slower on this GPU")
    exact, mine = checks(convert=False, layers=5), checks(convert=True, layers=5)
    assert len(exact) > 15
    assert len(mine) <= 2 * len(exact)
    assert not [line for line in mine if "NO_HASATTR" in line or "LAMBDA_GUARD" in line]
    assert not [line for line in mine if "check_obj_id" in line and "_hotrain," in line], "blocks could not share code"


def test_another_method_is_compiled_anew_and_followed() -> None:
    """A calibration or a bit schedule assigns methods during training."""
    model = Blocks()
    hotrain.convert(model, "hot-unbiased")
    run = compiled(model)
    gradients(model, lambda: squares(run(TOKENS)), 1)
    for _, _, state in hotrain.converted_layers(model):
        state.method = hotrain.preset("hq4")
    want = gradients(model, lambda: squares(model(TOKENS)), 1)
    with torch._dynamo.config.patch(error_on_recompile=False):
        assert_close(gradients(model, lambda: squares(run(TOKENS)), 1), want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_seeds_states_and_copies_reach_compiled_graphs() -> None:
    """`manual_seed` between two steps, a saved state loaded, a copy: the counter is on the device, the keys follow."""
    model = Blocks()
    hotrain.convert(model, "hot-unbiased")
    run = compiled(model)

    def step(call: Callable[..., Any]) -> list[Tensor]:
        model.zero_grad()
        squares(call(TOKENS)).backward()
        return [p.grad.clone() for p in model.parameters()]

    hotrain.manual_seed(5)
    first, second = step(run), step(run)
    state = draws.state_dict(model)
    assert {value for name, value in state.items() if name.startswith("step.")} == {1}
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert {s.draws.step for _, _, s in hotrain.converted_layers(twin)} == {1}
    third = step(run)
    hotrain.manual_seed(5)
    assert error(step(run), first) == 0
    draws.load_state_dict(model, state)
    assert error(step(run), third) == 0
    assert error(second, third) > 10 * CLOSE
    draws.load_state_dict(model, state)
    assert error(step(model), third) < CLOSE  # uncompiled steps go on from the same counter
    assert {s.draws.step for _, _, s in hotrain.converted_layers(model)} == {2}


@pytest.mark.parametrize("method", ["hot", "hla"])
def test_what_does_not_follow_the_method_is_said(method: str) -> None:
    """Rows that are samples run exact, and the report has the reason; a layer that was called is not reported as
    uncalled, whether its method draws or not."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    report = hotrain.convert(model, method)
    with torch._dynamo.config.patch(error_on_recompile=False):
        run = compiled(model)
        run(torch.randn(48, 64)).sum().backward()
        assert [row.reason.partition(" ")[0] for row in report.kept] == ["2-D", "2-D"]
        run(torch.randn(2, 48, 64)).sum().backward()
    assert len(report.converted) == 2


def test_reverting_leaves_no_operator_of_ours() -> None:
    model = Blocks()
    want = gradients(model, lambda: squares(model(TOKENS)), 1)
    hotrain.convert(model, "hot-unbiased")
    run = compiled(model)
    assert error(gradients(model, lambda: squares(run(TOKENS)), 1)[0], want[0]) > 10 * CLOSE
    assert hotrain.saved_bytes(model, TOKENS).total > 0
    hotrain.revert(model)
    with torch._dynamo.config.patch(error_on_recompile=False):
        assert_close(gradients(model, lambda: squares(run(TOKENS)), 1), want)


@pytest.mark.parametrize("frozen", ["weight", "input"])
def test_only_the_gradient_that_is_asked_for(frozen: str) -> None:
    layer = nn.Linear(64, 96)
    hotrain.convert(layer, "hot-unbiased")
    layer.weight.requires_grad_(frozen != "weight")
    x = TOKENS.clone().requires_grad_(frozen != "input")
    got = []
    for call in (layer, compiled(layer)):
        hotrain.manual_seed(1)
        wanted = [t for t in (x, layer.weight, layer.bias) if t.requires_grad]
        got.append(list(torch.autograd.grad(squares(call(x)), wanted)))
    assert len(got[0]) == 2
    assert error(got[1], got[0]) < CLOSE


def test_transposed_weights() -> None:
    """transformers' Conv1D: (I, O), and so is its gradient."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    model = nn.Sequential(conv1d(96, 64), nn.GELU(), conv1d(64, 96))
    hotrain.convert(model, "hot-unbiased")
    want = gradients(model, lambda: squares(model(TOKENS)), 2)
    run = compiled(model)
    assert_close(gradients(model, lambda: squares(run(TOKENS)), 2), want)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_convolutions_in_either_memory_format(layout: torch.memory_format) -> None:
    """1×1 (with and without a stride), k×k, groups, 'same' and reflected padding; images without a batch as well."""
    model = nn.Sequential(
        nn.Conv2d(32, 64, 1), nn.Conv2d(64, 64, 3, padding="same", groups=2), nn.ReLU(inplace=True),
        nn.Conv2d(64, 32, 1, stride=2), nn.Conv2d(32, 32, 3, padding=1, padding_mode="reflect"),
    ).to(memory_format=layout)  # fmt: skip
    hotrain.convert(model, "hot-unbiased", filter_fn=lambda module, name: True)
    x = torch.randn(2, 32, 12, 12).to(memory_format=layout)
    want = gradients(model, lambda: squares(model(x)), 2)
    run = compiled(model)
    assert_close(gradients(model, lambda: squares(run(x)), 2), want)
    assert run(x).stride() == model(x).stride()
    with torch._dynamo.config.patch(error_on_recompile=False):
        assert run(x[0]).shape == (32, 6, 6)


def test_relu_in_place_changes_its_input_for_all_to_see() -> None:
    act = nn.ReLU(inplace=True)
    model = nn.Sequential(nn.Linear(64, 64), act)
    hotrain.convert(model, "hot")

    def run(x: Tensor) -> Tensor:
        h = model[0](x)
        return act(h) + h

    want = gradients(model, lambda: squares(run(TOKENS)), 1)
    got = gradients(model, lambda: squares(compiled(run)(TOKENS)), 1)
    assert_close(got, want)


def test_a_second_derivative_is_refused() -> None:
    layer = nn.Linear(64, 64)
    hotrain.convert(layer, "hot")
    x = TOKENS.clone().requires_grad_()
    (g_x,) = torch.autograd.grad(squares(compiled(layer)(x)), x, create_graph=True)
    with pytest.raises(RuntimeError):
        g_x.square().sum().backward()


@pytest.mark.slow
def test_evaluation_is_one_graph() -> None:
    """A converted model deploys as it did before."""
    model = Net()
    hotrain.convert(model)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(IMAGES), model(IMAGES))


def test_what_is_compiled_already_is_refused() -> None:
    """Its traced code would go on with the exact layers until a guard fails: the message says in which order."""
    inner = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64)))
    with pytest.raises(ValueError, match="the model is compiled already"):
        hotrain.convert(torch.compile(inner))
    inner[1].compile()
    with pytest.raises(ValueError, match="'1' is compiled already"):
        hotrain.convert(inner)
    assert not list(hotrain.converted_layers(inner))


def test_one_plan_a_model() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    hotrain.convert(net, filter_fn=lambda _, name: name == "0", plan="memory")
    with pytest.raises(ValueError, match="'0' was converted with plan='memory' and stays so"):
        hotrain.convert(net, filter_fn=lambda _, name: name == "1")
    hotrain.convert(net, "hot", filter_fn=lambda *_: True)  # names all of them anew


def test_tracing_for_export_meets_no_checks_of_ours() -> None:
    """torch.export in evaluation mode: the exact program, no operator of hotrain's in it."""
    model = Net()
    hotrain.convert(model)
    model.eval()
    program = torch.export.export(model, (IMAGES,))
    torch.testing.assert_close(program.module()(IMAGES), model(IMAGES))
    assert not [node for node in program.graph.nodes if "hotrain" in str(node.target)]


def test_layers_are_guarded_by_nothing_that_names_them() -> None:
    """What a trace reads of a layer's method is one string, which tells methods and grids apart and nothing else."""
    model = Blocks()
    hotrain.convert(model, "hot-unbiased")
    specs = {state.spec for _, _, state in hotrain.converted_layers(model)}
    assert len(specs) == 1
    state = layer_state(model.blocks[0].fc1)
    assert state is not None
    before = state.spec
    state.follow(state.method, hotrain.Grid(5, 8), state.plan)
    assert state.spec != before

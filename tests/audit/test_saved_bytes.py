"""The audit against hand counts, and that it leaves no trace."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from small_models import ConvNet, TokenNet, assert_as_found, found, timm_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hotrain
from hotrain.audit.saved_bytes import CHECKPOINT, ELSEWHERE, WEIGHT_COPY, operator_name, saved_bytes


class Of(nn.Module):
    """A module around a function."""

    def __init__(self, function, *children: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(children)

    def forward(self, *inputs: Tensor):
        return self.function(*self.parts, *inputs)


def test_linear_layers_by_hand() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
    audit = saved_bytes(model, torch.randn(4, 8, 32))
    # The batch, kept by the first layer; and ReLU's result, kept by ReLU and by the second layer, counted once.
    assert audit.by_module == {"1": 4 * 8 * 64 * 4, "0": 4 * 8 * 32 * 4}
    assert audit.by_operator == {"relu": 4 * 8 * 64 * 4, "addmm": 4 * 8 * 32 * 4}
    assert audit.total == 4 * 8 * 96 * 4
    assert [row["bytes"] for row in audit.rows] == [8192, 4096]
    assert "addmm" in str(audit)


@pytest.mark.parametrize(
    ("function", "kept", "reason"),
    [
        (lambda x: x.sin(), 64, "one operand"),
        (lambda x: x * x, 64, "the same storage twice"),
        (lambda x: x[:2] * x[2:], 64, "two views of one storage: the whole storage, once"),
        (lambda x: x[:1].sin(), 64, "a view keeps all of its storage"),
        (lambda x: x + 1, 0, "an addition keeps nothing"),
        (lambda x: (x.exp(), x + 1)[1], 0, "a node that the result does not hold is gone"),
        (lambda x: x.exp().sum() * 0 + x.sum(), 64, "exp's result is kept though it does not matter"),
    ],
)
def test_storages(function, kept: int, reason: str) -> None:
    x = torch.randn(4, 4, requires_grad=True)
    audit = saved_bytes(Of(function), x)
    scalars = sum(row["bytes"] for row in audit.rows if row["shape"] == ())
    assert audit.total - scalars == kept, reason


def test_parameters_and_buffers_are_there_anyway() -> None:
    frozen = nn.Linear(32, 32).requires_grad_(False)
    x = torch.randn(4, 8, 32, requires_grad=True)
    assert saved_bytes(frozen, x).total == 0  # g_x needs w alone
    norm = nn.BatchNorm1d(32).eval()
    # In training mode: the input, mean and inverse deviation; not the running statistics.
    assert saved_bytes(norm, torch.randn(64, 32)).total == (64 * 32 + 2 * 32) * 4


@dataclass
class Answer:
    loss: Tensor
    parts: list[Tensor]


@pytest.mark.parametrize(
    "nest",
    [lambda y: {"y": y}, lambda y: (None, [y]), lambda y: Answer(y.sum(), [y]), lambda y: {"a": {"b": (y,)}}],
    ids=["dict", "tuple", "dataclass", "nested"],
)
def test_nested_outputs(nest) -> None:
    audit = saved_bytes(Of(lambda layer, x: nest(layer(x)), nn.Linear(8, 8)), torch.randn(4, 4, 8))
    assert audit.by_operator == {"addmm": 4 * 4 * 8 * 4}


def test_autocast_keeps_casts() -> None:
    layer, x = nn.Linear(32, 64, bias=False), torch.randn(4, 8, 32)
    with torch.autocast("cpu", torch.bfloat16):
        without_g_x, with_g_x = saved_bytes(layer, x), saved_bytes(layer, x.clone().requires_grad_())
    # The bf16 copy of x; and that of w where g_x is asked for.
    assert without_g_x.total == 4 * 8 * 32 * 2
    assert [row["dtype"] for row in without_g_x.rows] == ["bfloat16"]
    assert with_g_x.by_operator == {WEIGHT_COPY: 32 * 64 * 2, "mm": 4 * 8 * 32 * 2}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_keeps_its_input_alone(reentrant: bool) -> None:
    block = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=reentrant).sin()

    x = torch.randn(4, 8, 32, requires_grad=True)
    audit = saved_bytes(Of(forward, block), x)
    tensor = 4 * 8 * 32 * 4
    assert audit.by_operator == {CHECKPOINT: tensor, "sin": tensor}


def test_converted_linear_keeps_its_codes() -> None:
    model = TokenNet()
    x = torch.randn(4, 3, 16, 16)
    exact = saved_bytes(model, x)
    hotrain.convert(model, "hot")
    audit = saved_bytes(model, x)
    # 64 tokens, half of the rows, one byte each; a scale (4 bytes) and the key of the draws (8 bytes) a layer.
    rows = 4 * 16 // 2
    for name, width in (("fc1", 32), ("fc2", 64), ("embed", 48)):
        assert audit.by_module[name] == rows * width + 12, name
    assert audit.by_operator["hotrain linear"] == rows * (32 + 64) + 24
    assert audit.by_operator["hotrain conv2d"] == rows * 48 + 12
    assert audit.by_operator["addmm"] < exact.by_operator["addmm"]
    assert audit.total < exact.total


def test_frozen_converted_layer_keeps_nothing() -> None:
    model = TokenNet()
    hotrain.convert(model, "hot")
    model.fc1.requires_grad_(False)
    assert saved_bytes(model, torch.randn(4, 3, 16, 16)).by_module.get("fc1", 0) <= 8  # the key of the draws


@pytest.mark.parametrize("method", ["exact", "hot-unbiased"])
@pytest.mark.parametrize("training", [True, False])
def test_left_as_found(method: str, training: bool) -> None:
    model = ConvNet().train(training)
    hotrain.convert(model, method)
    model.head(torch.randn(2, 32)).sum().backward()
    before = found(model)
    first = saved_bytes(model, torch.ones(2, 32, 8, 8))
    assert_as_found(model, before)
    assert saved_bytes(model, torch.ones(2, 32, 8, 8)) == first


def test_left_as_found_after_an_error() -> None:
    model = ConvNet()
    before = found(model)
    with pytest.raises(RuntimeError):
        saved_bytes(model, torch.ones(2, 7, 8, 8))
    assert_as_found(model, before)


def test_a_frozen_part_stays_frozen() -> None:
    model = ConvNet()
    model.norm.eval()
    kept = saved_bytes(model, torch.ones(2, 32, 8, 8)).by_module["norm"]
    # A BatchNorm in eval mode keeps its input but no statistics of the batch.
    assert kept == 2 * 32 * 8 * 8 * 4


def test_nothing_to_keep_is_an_error() -> None:
    model = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(ValueError, match="requires grad"):
        saved_bytes(model, torch.ones(2, 4))
    with torch.inference_mode(), pytest.raises(ValueError, match="inference_mode"):
        saved_bytes(nn.Linear(4, 4), torch.ones(2, 4))


def test_grad_is_enabled_for_the_audit() -> None:
    with torch.no_grad():
        assert saved_bytes(nn.Linear(4, 4), torch.ones(2, 4)).total == 2 * 4 * 4


def test_device_peak_needs_cuda() -> None:
    with pytest.raises(ValueError, match="CUDA"):
        saved_bytes(nn.Linear(4, 4), torch.ones(2, 4), device_peak=True)


@pytest.mark.parametrize("name", ["test_vit", "test_resnet"])
def test_every_byte_has_an_operator(name: str) -> None:
    model = timm_model(name, num_classes=10)
    for method in ("exact", "hot-unbiased"):
        hotrain.convert(model, method)
        audit = saved_bytes(model, torch.randn(2, 3, 160, 160))
        assert ELSEWHERE not in audit.by_operator
        assert sum(audit.by_module.values()) == sum(audit.by_operator.values()) == audit.total > 0
        assert "" not in audit.by_module  # each byte is saved inside a named module


def test_keyword_inputs_and_model_outputs() -> None:
    import transformers

    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=50
    )
    model = transformers.BertForSequenceClassification(config)
    tokens = torch.randint(0, 50, (2, 9))
    audit = saved_bytes(model, input_ids=tokens, labels=torch.tensor([0, 1]))
    assert audit.by_module["bert.encoder.layer.0.output.dense"] == 2 * 9 * 64 * 4  # GELU's result
    assert ELSEWHERE not in audit.by_operator


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: nn.functional.layer_norm(x, (4,)), "native_layer_norm"),
        (lambda x: nn.functional.max_pool2d(x[None, None], 2), "max_pool2d_with_indices"),
        (lambda x: x.exp(), "exp"),
        (lambda x: Halve.apply(x), "Halve"),
    ],
)
def test_operator_names(function, name: str) -> None:
    y = function(torch.randn(4, 4, requires_grad=True))
    node = y.grad_fn
    while name not in ("exp", operator_name(node)) and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    assert operator_name(node) == name


class Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x / 2

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return g / 2


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["exact", "hot", "hq4"])
def test_the_allocator_agrees(method: str) -> None:
    """What the CUDA allocator holds after the forward is what the audit counts, without the output."""
    model = TokenNet(256).cuda()
    hotrain.convert(model, method)
    x = torch.randn(256, 3, 16, 16, device="cuda")
    audit = saved_bytes(model, x, device_peak=True)
    model(x).sum().backward()  # workspaces of the libraries exist from here on
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = model(x)
    held = torch.cuda.memory_allocated() - before - y.untyped_storage().nbytes()
    on_device = sum(row["bytes"] for row in audit.rows if row["shape"] != () and row["shape"] != tuple(x.shape))
    # The allocator rounds each block up to 512 bytes; x was there before.
    assert on_device <= held <= on_device + 512 * (len(audit.rows) + 8)
    assert audit.device_peak is not None
    assert audit.device_peak >= held

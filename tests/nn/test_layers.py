"""What a converted layer does in training and out of it: what it keeps, what it refuses, what it hands on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import hotrain
from hotrain.nn import HadamardConv2d, HadamardLinear, layer_state


def kept_by(call: Callable[[], Tensor]) -> list[Tensor]:
    """What autograd keeps of a forward, without copies of one storage."""
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        y = call()
    del y
    return kept


def linear(method: str = "hot-unbiased", **options: Any) -> nn.Linear:
    layer = nn.Linear(64, 48, **options)
    hotrain.convert(layer, method)
    return layer


def tokens(*lead: int, grad: bool = False) -> Tensor:
    return torch.randn(*(lead or (2, 48)), 64, requires_grad=grad)


def conv(method: str = "hot-unbiased", **options: Any) -> nn.Conv2d:
    layer = nn.Conv2d(32, 48, 3, padding=1, **options)
    hotrain.convert(layer, method)
    return layer


def image(grad: bool = False) -> Tensor:
    return torch.randn(2, 32, 8, 8, requires_grad=grad)


LAYERS = pytest.mark.parametrize(("make", "sample"), [(linear, tokens), (conv, image)], ids=["linear", "conv"])


@LAYERS
def test_training_keeps_codes_and_no_activation(make: Any, sample: Any) -> None:
    """The point of the library: nothing that backward waits for has x's size in x's dtype."""
    layer, x = make(), sample(grad=True)
    kept = kept_by(lambda: layer(x))
    codes = [t for t in kept if t.dtype == torch.int8]
    assert len(codes) == 1
    assert codes[0].numel() == x.numel() // 2  # r = 8 of 16
    assert [t.shape for t in kept if t.is_floating_point() and t.numel() > 1] == [layer.weight.shape]


@LAYERS
@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference"])
def test_out_of_training_the_parents_forward_runs(make: Any, sample: Any, mode: str) -> None:
    """Evaluation has the parent's graph and the parent's gradients; under no_grad nothing at all is kept."""
    layer, x = make(), sample()
    exact = copy.deepcopy(layer)
    hotrain.revert(exact)
    if mode == "eval":
        layer.eval(), exact.eval()
        y = layer(x)
        assert y.grad_fn.name() == exact(x).grad_fn.name()
        y.square().sum().backward()
        exact(x).square().sum().backward()
        assert torch.equal(layer.weight.grad, exact.weight.grad)
        return
    with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
        assert kept_by(lambda: layer(x)) == []
        y = layer(x)
        assert torch.equal(y, exact(x))
    assert not y.requires_grad


@LAYERS
def test_a_frozen_weight_keeps_no_input(make: Any, sample: Any) -> None:
    layer, x = make(), sample(grad=True)
    layer.weight.requires_grad_(False)
    kept = kept_by(lambda: layer(x))
    assert all(t.numel() in (1, layer.weight.numel()) for t in kept)
    layer(x).square().sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
    assert x.grad is not None
    assert x.grad.isfinite().all()


@LAYERS
def test_an_input_without_gradient_keeps_no_weight(make: Any, sample: Any) -> None:
    layer = make()
    kept = kept_by(lambda: layer(sample()))
    assert not any(t.is_floating_point() and t.shape == layer.weight.shape for t in kept)


def test_only_the_bias_trains() -> None:
    """BitFit: neither gradient path is asked for, so the exact layer runs, which keeps nothing either."""
    layer, x = linear(), tokens()
    layer.weight.requires_grad_(False)
    assert kept_by(lambda: layer(x)) == []
    layer(x).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((48,), 96.0))


@LAYERS
def test_the_bias_gradient_is_exact(make: Any, sample: Any) -> None:
    layer, x = make(), sample()
    exact = copy.deepcopy(layer)
    hotrain.revert(exact)
    for module in (layer, exact):
        module(x).square().sum().backward()
    # sums of 96 or 128 terms in another order: relative to their magnitudes' sum, n·eps
    torch.testing.assert_close(layer.bias.grad, exact.bias.grad, rtol=2e-5, atol=2e-4)


@LAYERS
@pytest.mark.parametrize("of", ["weight", "input"])
def test_a_second_derivative_is_refused_by_name(make: Any, sample: Any, of: str) -> None:
    """A gradient penalty on quantized gradients would be silently wrong."""
    model = nn.Sequential(make())
    hotrain.revert(model)
    hotrain.convert(model, "hot")
    x = sample(grad=True)
    target = x if of == "input" else model[0].weight
    with pytest.raises(RuntimeError, match=r"create_graph=True: '0' has no second derivative"):
        torch.autograd.grad(model(x).square().sum(), target, create_graph=True)


@LAYERS
@pytest.mark.parametrize("method", ["hot-unbiased", "luq", "hq4"])
def test_backward_twice_over_one_graph_gives_the_same_numbers(make: Any, sample: Any, method: str) -> None:
    """retain_graph: the draws belong to the forward, so both passes agree."""
    layer, x = make(method), sample(grad=True)
    y = layer(x).square().sum()
    first = torch.autograd.grad(y, [x, layer.weight], retain_graph=True)
    second = torch.autograd.grad(y, [x, layer.weight])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@LAYERS
@pytest.mark.parametrize("kind", [torch.complex64, torch.int64, torch.bool], ids=str)
def test_inputs_without_a_gradient_path_are_refused(make: Any, sample: Any, kind: torch.dtype) -> None:
    layer = make()
    with pytest.raises(TypeError, match=r"^(Linear|Conv2d): the input is .*accepted are"):
        layer(torch.zeros(sample().shape, dtype=kind))


def test_inputs_that_are_no_dense_block_are_refused_by_their_layout() -> None:
    with pytest.raises(TypeError, match="the input is sparse_coo; accepted are dense"):
        linear()(torch.zeros(4, 64).to_sparse())
    ragged = torch.nested.nested_tensor([torch.randn(3, 64), torch.randn(5, 64)], layout=torch.jagged)
    with pytest.raises(TypeError, match="the input is jagged; accepted are dense"):
        linear()(ragged)


@pytest.mark.parametrize("make", [linear, conv])
def test_a_wrong_width_names_the_layer_and_what_fits(make: Any) -> None:
    model = nn.Sequential(nn.Identity(), make())
    hotrain.revert(model)
    hotrain.convert(model)
    with pytest.raises(ValueError, match=r"^1: the input has shape .*; accepted are (64|32) channels"):
        model(torch.randn(2, 31, 8, 63))


# layer, the shape of another weight, the inputs' shapes before and after: none changes in_features or kernel_size
EXCHANGED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "inputs": (lambda: nn.Linear(64, 48), (48, 96), (2, 16, 64), (2, 16, 96)),
    "images of more channels": (lambda: nn.Conv2d(3, 48, 4, 4), (48, 6, 4, 4), (2, 3, 8, 8), (2, 6, 8, 8)),
    "groups": (lambda: nn.Conv2d(32, 48, 3, groups=2), (48, 32, 3, 3), (2, 32, 8, 8), (2, 64, 8, 8)),
    "patches that overlap now": (lambda: nn.Conv2d(16, 48, 2, 2), (48, 16, 4, 4), (2, 16, 8, 8), (2, 16, 8, 8)),
    "one pixel": (lambda: nn.Conv2d(16, 48, 3), (48, 16, 1, 1), (2, 16, 8, 8), (2, 16, 8, 8)),
    "PyTorch pads by its new kernel": (
        lambda: nn.Conv2d(16, 48, 3, padding="same"), (48, 16, 5, 5), (2, 16, 8, 8), (2, 16, 8, 8)
    ),
    "PyTorch pads by its old kernel": (
        lambda: nn.Conv2d(16, 48, 3, padding="same", padding_mode="circular"),
        (48, 16, 5, 5), (2, 16, 8, 8), (2, 16, 8, 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("case", EXCHANGED)
def test_a_weight_of_another_shape_is_read_as_pytorch_reads_it(case: str, when: str, how: str) -> None:
    """PyTorch computes by the weight's own shape; layers raised, or failed in backward, after a step of the old too."""
    make, shape, old, new = EXCHANGED[case]
    layer = make().double()
    weight, x = torch.randn(shape, dtype=torch.double), torch.randn(new, dtype=torch.double)
    found = []
    for converts in (False, True):
        model = run = copy.deepcopy(layer)
        if when == "before":
            model.weight = nn.Parameter(weight.clone())
        if converts:
            hotrain.convert(model, hotrain.preset("hla", rank=16), filter_fn=lambda module, name: True)
            run = torch.compile(model, backend="aot_eager") if how == "compiled" else model
        if when == "after":
            run(torch.randn(old, dtype=torch.double)).sum().backward()
            model.weight = nn.Parameter(weight.clone())
        x_t = x.clone().requires_grad_()
        y = run(x_t)
        found.append((y, *torch.autograd.grad(y.sin().sum(), (x_t, model.weight))))
    (want, *exact), (y, *grads) = found
    assert torch.equal(y, want)
    torch.testing.assert_close(grads, exact)  # full rank without bits


@LAYERS
def test_an_empty_batch_works(make: Any, sample: Any) -> None:
    layer = make()
    x = sample()[:0].requires_grad_()
    layer(x).sum().backward()
    assert x.grad.shape == x.shape
    assert torch.equal(layer.weight.grad, torch.zeros_like(layer.weight))
    assert torch.equal(layer.bias.grad, torch.zeros_like(layer.bias))


@LAYERS
def test_a_batch_of_one_works(make: Any, sample: Any) -> None:
    layer, x = make(), sample()[:1]
    layer(x).square().sum().backward()
    assert layer.weight.grad.isfinite().all()
    assert layer.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("inner", [torch.bfloat16, torch.float16], ids=str)
@LAYERS
def test_autocast_leaves_float32_gradients_to_float32_weights(make: Any, sample: Any, inner: torch.dtype) -> None:
    layer, x = make(), sample(grad=True)
    with torch.autocast("cpu", inner):
        y = layer(x)
    assert y.dtype == inner
    y.float().square().mean().backward()
    assert [layer.weight.grad.dtype, layer.bias.grad.dtype, x.grad.dtype] == [torch.float32] * 3


def test_under_autocast_what_is_kept_takes_the_inner_dtypes_width() -> None:
    """hla keeps P x itself: half the rows, in bf16 and not in the input's float32."""
    layer, x = linear("hla"), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        kept = kept_by(lambda: layer(x))
    assert sum(t.nbytes for t in kept if t.shape[-1] == 64) == x.numel() // 2 * 2


@LAYERS
def test_the_scaler_sees_an_overflow_and_skips_the_step(make: Any, sample: Any) -> None:
    """fp16 with GradScaler: an inf in g_y must reach the gradients, or the scale would never come down."""
    layer, x = make(), sample()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = layer.weight.detach().clone()
    scales = []
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = layer(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales[0] == 2.0**39  # the first step overflowed and was skipped
    assert scales[-1] == scales[-2] < 2.0**39  # until it fitted, and then it trained
    assert not torch.equal(layer.weight, before)
    assert layer.weight.isfinite().all()


@LAYERS
def test_gradients_accumulate_over_micro_batches(make: Any, sample: Any) -> None:
    """Two backward passes into one .grad are the sum of the two, each with its own draws."""
    layer = make()
    xs = [sample(), sample()]
    hotrain.manual_seed(7)
    single = []
    for x in xs:
        layer.zero_grad()
        layer(x).square().sum().backward()
        single.append(layer.weight.grad.clone())
    hotrain.manual_seed(7)
    layer.zero_grad()
    for x in xs:
        layer(x).square().sum().backward()
    assert torch.equal(layer.weight.grad, single[0] + single[1])


@LAYERS
def test_hooks_on_both_sides_still_fire(make: Any, sample: Any) -> None:
    layer, seen = make(), []
    layer.register_forward_pre_hook(lambda *_: seen.append("pre"))
    layer.register_forward_hook(lambda *_: seen.append("forward"))
    layer.register_full_backward_pre_hook(lambda *_: seen.append("backward pre"))
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    layer.weight.register_post_accumulate_grad_hook(lambda _: seen.append("grad"))
    layer(sample(grad=True)).sum().backward()
    assert sorted(seen) == ["backward", "backward pre", "forward", "grad", "pre"]


def test_all_that_waits_for_backward_can_be_moved_off_the_device() -> None:
    """save_on_cpu packs and unpacks every kept tensor: the codes, the scales and the key of the draws."""
    layer, x = linear(), tokens(grad=True)
    grads = []
    for context in (saved_tensors_hooks(lambda t: t, lambda t: t), torch.autograd.graph.save_on_cpu()):
        hotrain.manual_seed(3)
        with context:
            y = layer(x).square().sum()
        grads.append(torch.autograd.grad(y, [x, layer.weight]))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_layer_built_by_hand_is_the_layer() -> None:
    """`hotrain.nn` mirrors `torch.nn`: the same arguments, the method last; asked for by name, it takes 2-D inputs."""
    layer = HadamardLinear(64, 48, False, method="hla")
    assert isinstance(layer, nn.Linear)
    assert layer.bias is None
    assert "method=hla" in repr(layer)
    layer(torch.randn(32, 64)).sum().backward()
    assert layer_state(layer).fallback is None
    image_layer = HadamardConv2d(32, 48, 3, padding="same", method=hotrain.preset("hot", rank=4))
    assert "P4of16" in repr(image_layer)
    image_layer(image()).sum().backward()
    with pytest.raises(ValueError, match="unknown preset 'hott'"):
        HadamardLinear(64, 48, method="hott")


def test_token_matrix_lays_out_channels_last() -> None:
    y = torch.arange(2 * 48 * 3 * 5.0).view(2, 48, 3, 5)
    matrix = HadamardConv2d(32, 48, 3).token_matrix(y)
    assert matrix.shape == (30, 48)
    assert torch.equal(matrix[7], y[0, :, 1, 2])
    assert HadamardLinear(64, 48).token_matrix(torch.zeros(2, 3, 5, 48)).shape == (30, 48)


def test_a_module_used_twice_draws_twice_and_sums_its_gradients() -> None:
    """Weight sharing by calling one layer twice: each call has its own codes and its own draws."""
    layer = nn.Linear(64, 64)
    hotrain.convert(layer, "hot-unbiased")
    x = tokens(2, 48, grad=True)
    layer(layer(x)).square().mean().backward()
    assert layer_state(layer).draws.step == 1
    exact = nn.Linear(64, 64)
    exact.load_state_dict(layer.state_dict())
    exact(exact(x)).square().mean().backward()
    # one draw of 4+4 rows on white noise has an error of the gradient's own size; its direction is right
    assert nn.functional.cosine_similarity(layer.weight.grad.flatten(), exact.weight.grad.flatten(), dim=0) > 0.5


def test_frozen_everything_is_harmless() -> None:
    layer = linear()
    layer.requires_grad_(False)
    assert not layer(tokens()).requires_grad


def test_a_method_can_be_exchanged_on_a_layer() -> None:
    """Calibration assigns methods layer by layer; the next forward follows."""
    layer, x = linear("hot"), tokens()
    layer_state(layer).method = hotrain.preset("dropout")
    assert [t.shape for t in kept_by(lambda: layer(x)) if t.numel() > 1] == [(96, 64)]  # x whole


def test_the_device_meta_and_a_default_device_are_no_obstacle() -> None:
    """Shapes are traced on meta; a default device must not catch the key of the draws (it is read on the CPU)."""
    layer = nn.Linear(64, 48, device="meta")
    hotrain.convert(layer, "hot")
    layer(torch.randn(2, 48, 64, device="meta")).sum().backward()
    assert layer.weight.grad.shape == (48, 64)
    on_cpu, x = linear(), tokens()
    with torch.device("meta"):
        y = on_cpu(x)
    y.sum().backward()
    assert on_cpu.weight.grad.device.type == "cpu"

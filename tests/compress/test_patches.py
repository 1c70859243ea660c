"""Compiled on a GPU, a convolution that cuts an image of few channels into patches is a product of these: cuDNN has no
fast kernels for it. The tests do on the CPU what happens on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

import hotrain
from hotrain import geometry
from hotrain.compress import compiled

LAST = torch.channels_last
CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


@pytest.fixture(autouse=True)
def _on_a_gpu(laid_out_on_cpu: None) -> None:
    torch._dynamo.reset()


def with_graphs(model: Any, **options: Any) -> tuple[Any, list[torch.fx.Graph]]:
    graphs: list[torch.fx.Graph] = []

    def keep(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=compiled.partition)
    return torch.compile(model, backend=backend, fullgraph=True, **options), graphs


def convolutions(graphs: list[torch.fx.Graph]) -> int:
    return sum(len(g.find_nodes(op="call_function", target=target)) for g in graphs for target in CONVOLUTIONS)


def product(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    rows = geometry.rows_of_patches(x, w.shape[2:])
    return geometry.product_of_patches(rows, w, b, geometry.keeps_channels_last(x, w))


class Net(nn.Module):
    """Patches, of which the model itself views rows, as PyTorch's result in the default layout lets it."""

    def __init__(self, conv: nn.Module, outputs: int) -> None:
        super().__init__()
        self.patch, self.norm, self.out = conv, nn.LayerNorm(outputs), nn.Linear(outputs, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        maps = self.patch(x)
        rows = maps.view(*maps.shape[:2], -1) if maps.is_contiguous() else maps.flatten(2)
        return self.out(self.norm(rows.transpose(1, 2))), maps


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((2, 3, 32, 48), id="sizes that patches divide"),
        pytest.param((2, 3, 35, 50), id="pixels of no patch"),
        pytest.param((1, 1, 8, 4), id="one patch a line, one channel"),
    ],
)
@pytest.mark.parametrize("kernel", [(4, 4), (8, 2)])
def test_the_product_is_the_convolution(shape: tuple[int, ...], kernel: tuple[int, int]) -> None:
    """In float64, of images in both layouts; with its gradients, of pixels of no patch too."""
    w, b = torch.randn(5, shape[1], *kernel).double(), torch.randn(5).double()
    for form in (torch.contiguous_format, LAST):
        x = torch.randn(shape).double().contiguous(memory_format=form)
        given = [t.clone().requires_grad_() for t in (x, w, b)]
        y, want = product(*given), F.conv2d(*given, kernel)
        torch.testing.assert_close(y, want)
        assert y.stride() == want.stride()
        g = torch.randn_like(want)
        found, wanted = (torch.autograd.grad(t, given, g) for t in (y, want))
        torch.testing.assert_close(found, wanted)


def test_of_a_video_too() -> None:
    """Patches of two images and 3×2 pixels, of sizes that they do not divide."""
    x, w, b = torch.randn(2, 3, 5, 9, 8), torch.randn(7, 3, 2, 3, 2), torch.randn(7)
    given = [t.double().requires_grad_() for t in (x, w, b)]
    y, want = product(*given), F.conv3d(*given, (2, 3, 2))
    torch.testing.assert_close(y, want)
    g = torch.randn_like(want)
    torch.testing.assert_close(*(torch.autograd.grad(t, given, g) for t in (y, want)))


def are_multiplied(net: Net, method: str, x: Tensor, cast: bool = True) -> None:
    """One step of a model and of its copy in eager mode: results and strides of both, and the patches' gradients."""
    exact = copy.deepcopy(net)
    hotrain.convert(net, method, memory="block")
    run, graphs = with_graphs(net)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        y, maps = run(x)
        want, want_maps = exact(x)
        g = torch.randn_like(want)
        y.backward(g)
        want.backward(g)
    assert len(graphs) == 2
    assert convolutions(graphs) == 0
    # Both round a float32 sum to bfloat16, of 8 bits: half a step each, of the largest entries.
    torch.testing.assert_close(maps, want_maps, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(y, want, rtol=2**-6, atol=2**-5)
    assert [t.stride() for t in (y, maps)] == [t.stride() for t in (want, want_maps)]
    for name in ("weight", "bias"):
        mine, other = (getattr(model.patch, name).grad for model in (net, exact))
        error = (mine - other).norm() / other.norm()
        assert error < (0.1 if method == "hq8" else 0.06), name  # of 8-bit codes of both; of a norm's 4-bit codes
        assert mine.stride() == other.stride()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("method", ["hq8", "exact"])
@pytest.mark.parametrize("cast", [False, True])
def test_patches_are_multiplied_in_compiled_code(method: str, last: bool, cast: bool) -> None:
    """Of a converted layer and of an exact one, in 16 bits by autocast or all along, in the layout of the model."""
    net = Net(nn.Conv2d(3, 32, 8, 8), 32)
    x = torch.randn(4, 3, 96, 64)
    if last:
        net, x = net.to(memory_format=LAST), x.contiguous(memory_format=LAST)
    if not cast:
        net, x = net.bfloat16(), x.bfloat16()
    are_multiplied(net, method, x, cast)


@pytest.mark.parametrize("spelled", [{}, {"padding": "valid"}, {"padding": (0, 0, 0), "dilation": (1, 1, 1)}])
@pytest.mark.parametrize("last", [False, True])
def test_patches_of_a_video_are_multiplied(spelled: dict[str, Any], last: bool) -> None:
    """As VideoMAE and V-JEPA begin."""
    net = Net(nn.Conv3d(3, 32, (2, 8, 8), (2, 8, 8), **spelled), 32)
    x = torch.randn(2, 3, 4, 64, 48)
    if last:
        net.patch, x = (t.to(memory_format=torch.channels_last_3d) for t in (net.patch, x))
    are_multiplied(net, "exact", x)


def _stem(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Conv2d(**{"in_channels": 3, "out_channels": 32, "kernel_size": 8, "stride": 8} | options)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(_stem(stride=4), id="patches that overlap"),
        pytest.param(_stem(kernel_size=4), id="patches with pixels between them"),
        pytest.param(_stem(padding=4), id="padded"),
        pytest.param(_stem(kernel_size=7, padding="same", stride=1), id="padded, by a word"),
        pytest.param(_stem(dilation=2), id="pixels apart from each other"),
        pytest.param(_stem(groups=3, out_channels=48), id="groups"),
        pytest.param(_stem(kernel_size=1, stride=1), id="one pixel"),
        pytest.param(_stem(kernel_size=1, stride=2), id="one pixel of four"),
        pytest.param(_stem(in_channels=16), id="as many channels as cuDNN needs"),
    ],
)
@pytest.mark.parametrize("method", ["hq8", "exact"])
def test_others_stay_convolutions(make: Callable[[], nn.Module], method: str) -> None:
    conv = make()
    net = Net(conv, conv.out_channels)  # type: ignore[arg-type]
    hotrain.convert(net, method, memory="block", filter_fn=lambda _, name: name == "patch")
    run, graphs = with_graphs(net)
    with torch.autocast("cpu", torch.bfloat16):
        run(torch.randn(4, conv.in_channels, 64, 64))[0].sum().backward()  # type: ignore[arg-type]
    assert convolutions(graphs[:1]) == 1


@pytest.mark.parametrize("method", ["hq8", "exact"])
def test_in_eager_mode_and_in_float32_they_are_convolutions_to_the_bit(method: str) -> None:
    net = Net(nn.Conv2d(3, 32, 8, 8), 32)
    exact = copy.deepcopy(net)
    hotrain.convert(net, method, memory="block")
    x = torch.randn(4, 3, 96, 64)
    run, graphs = with_graphs(net)
    assert torch.equal(run(x)[1], exact(x)[1])
    assert convolutions(graphs[:1]) == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(net(x)[1], exact(x)[1])


@pytest.mark.parametrize("method", ["hq8", "exact"])
def test_batches_and_sizes_may_change(method: str) -> None:
    """Of one graph: patches are cut by symbolic sizes."""
    net = Net(nn.Conv2d(3, 32, 4, 4), 32)
    exact = copy.deepcopy(net)
    hotrain.convert(net, method, memory="block")
    run, _ = with_graphs(net, dynamic=True)
    with torch.autocast("cpu", torch.bfloat16):
        for shape in ((4, 3, 96, 64), (6, 3, 66, 83)):
            x = torch.randn(shape)
            y, maps = run(x)
            y.float().square().mean().backward()
            torch.testing.assert_close(maps, exact(x)[1], rtol=2**-7, atol=2**-7)


def test_an_image_smaller_than_a_patch_is_refused_by_pytorch() -> None:
    net = Net(nn.Conv2d(3, 512, 64, 64), 512)
    hotrain.convert(net, "exact", memory="block")
    run, _ = with_graphs(net)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match=r"(?i)kernel size"):
        run(torch.randn(32, 3, 60, 64))


class Then(nn.Module):
    def __init__(self, conv: nn.Module, then: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.then = conv, then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.conv, x)


def _halved(conv: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = conv(x)
    y[:, :16] *= 0.5
    return y


@pytest.mark.parametrize("method", ["hq8", "exact"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("size", [64, 8])
@pytest.mark.parametrize("then", [lambda conv, x: conv(x).relu_(), lambda conv, x: nn.SiLU(True)(conv(x)), _halved])
def test_the_result_may_be_written_to(method: str, last: bool, size: int, then: Any) -> None:
    """It is no view of what was multiplied; of one patch an image, too, where no copy is made."""
    net = Then(nn.Conv2d(3, 32, 8, 8), then)
    x = torch.randn(4096 // size, 3, size, size)
    if last:
        net, x = net.to(memory_format=LAST), x.contiguous(memory_format=LAST)
    exact = copy.deepcopy(net)
    hotrain.convert(net, method, memory="block", filter_fn=lambda *_: True)
    run, graphs = with_graphs(net)
    with torch.autocast("cpu", torch.bfloat16):
        y, want = run(x), exact(x)
        y.float().square().sum().backward()
    assert convolutions(graphs) == 0
    torch.testing.assert_close(y, want, rtol=2**-7, atol=2**-7)
    assert y.stride() == want.stride()


@pytest.mark.parametrize("method", ["hq8", "exact"])
@pytest.mark.parametrize("what", ["a lower image", "a bias of one", "a bias of a row", "other channels"])
def test_what_pytorch_refuses_is_refused(method: str, what: str) -> None:
    """A product would give an empty result, or broadcast the bias."""
    conv, x = nn.Conv2d(3, 32, 16, 16), torch.randn(32, 3, 64, 64)
    if what == "a lower image":
        x = torch.randn(32, 3, 8, 256)
    elif what == "other channels":
        x = torch.randn(32, 4, 64, 64)
    else:
        conv.bias = nn.Parameter(torch.zeros(1 if what == "a bias of one" else (1, 32)))
    net = Then(conv, lambda conv, x: conv(x))
    hotrain.convert(net, method, memory="block", filter_fn=lambda *_: True)
    run, _ = with_graphs(net)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises((RuntimeError, ValueError), match=r"size|bias|channels"):
        run(x)


@pytest.mark.parametrize("marked", [False, True])
def test_sizes_that_change_are_compiled_as_often_as_without_hotrain(marked: bool) -> None:
    """Which pixels belong to no patch would be guarded."""
    counts = []
    for method in (None, "exact"):
        torch._dynamo.reset()
        net = Then(nn.Conv2d(3, 32, 8, 8), lambda conv, x: conv(x).flatten(2))
        if method is not None:
            hotrain.convert(net, method, memory="block")
        run, graphs = with_graphs(net)
        for shape in ((4, 3, 96, 64), (6, 3, 99, 70), (2, 3, 128, 128), (5, 3, 120, 75), (7, 3, 75, 120)):
            x = torch.randn(shape)
            if marked:
                for axis in (0, 2, 3):
                    torch._dynamo.mark_dynamic(x, axis)
            with torch.autocast("cpu", torch.bfloat16):
                run(x).float().sum().backward()
        counts.append(len(graphs))
    assert counts[0] == counts[1]


def test_a_gradient_has_its_parameters_strides() -> None:
    """Of one channel, where PyTorch takes those of a contiguous gradient for equal."""
    net = Then(nn.Conv2d(1, 32, 8, 8), lambda conv, x: conv(x)).to(memory_format=LAST)
    hotrain.convert(net, "exact", memory="block")
    run, graphs = with_graphs(net)
    with torch.autocast("cpu", torch.bfloat16):
        run(torch.randn(32, 1, 64, 64)).float().square().sum().backward()
    assert convolutions(graphs) == 0
    assert net.conv.weight.grad.stride() == net.conv.weight.stride()  # type: ignore[union-attr]

"""Compiled on a GPU, convolutions of a model in PyTorch's default memory layout run in channels_last, as PyTorch's
compiler runs the exact model's. The model and its caller see the default layout. The tests do on the CPU what happens
on a GPU."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hotrain
from hotrain.compress import compiled
from hotrain.compress.operators import batch_norm, group_norm, image_norm

LAST = torch.channels_last
CLONE = torch.ops.aten.clone.default
# Of a step with codes of 4 and 8 bits against the exact one, by the largest of `test_compressed_models`.
NEAR = 0.26


@pytest.fixture(autouse=True)
def _on_a_gpu(laid_out_on_cpu: None) -> None:
    torch._dynamo.reset()


class Both(NamedTuple):
    first: Tensor
    others: list[Tensor]


class Net(nn.Module):
    """A stem, batch norms, a strided and a pointwise convolution, and a head that views an image as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.inner, self.second = nn.Conv2d(32, 64, 3, 2, 1, bias=False), nn.BatchNorm2d(64)
        self.point, self.maps = nn.Conv2d(64, 48, 1), nn.Conv2d(48, 5, 3, padding="same")
        self.head = nn.Linear(48 * 16 * 16, 10)

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = F.relu(self.first(self.stem(x)))
        x = F.gelu(self.point(F.relu(self.second(self.inner(x)))))
        return {"rows": self.head(x.view(x.size(0), -1)), "maps": Both(self.maps(x), [x.view_as(x) + 1])}


def images(y: dict[str, Any]) -> list[Tensor]:
    return [y["maps"][0], y["maps"][1][0]]


def step(model: Any, x: Tensor) -> tuple[dict[str, Any], Tensor]:
    y = model(x)
    sum((t.square().mean() for t in (y["rows"], *images(y))), torch.zeros(())).backward()
    return y, torch.cat([p.grad.flatten() for p in model.parameters()])


class Seen:
    """A compiler of graphs that notes the images which convolutions read and write, and their gradients'."""

    def __init__(self) -> None:
        self.images: dict[str, list[Tensor]] = {"forward": [], "backward": []}
        self.graphs: list[torch.fx.Graph] = []
        halves = {f"{name[0]}w_compiler": functools.partial(self.look, name) for name in ("forward", "backward")}
        self.backend = aot_autograd(**halves, partition_fn=compiled.partition)

    def look(self, half: str, graph: torch.fx.GraphModule, _: Sequence[Any]) -> Any:
        self.graphs.append(graph.graph)
        for node in graph.graph.nodes:
            read: list[Any] = []
            if node.target is torch.ops.aten.convolution.default:
                read = [node.args[0], node]
            elif node.target is torch.ops.aten.convolution_backward.default:
                read = list(node.args[:2])
            elif node.target is torch.ops.hotrain.conv2d_gradients.default:
                self.images[half].append(node.args[0].meta["val"].permute(0, 3, 1, 2))
            self.images[half] += [t.meta["val"] for t in read]
        return make_boxed_func(graph.forward)

    def in_layout(self, half: str, layout: torch.memory_format) -> tuple[int, int]:
        """Images in this layout, of how many."""
        return sum(t.is_contiguous(memory_format=layout) for t in self.images[half]), len(self.images[half])


@pytest.mark.parametrize("plan", ["speed", "memory"])
def test_a_model_in_the_default_layout_convolves_in_channels_last(plan: str) -> None:
    """And nothing that its caller sees says so, with convolutions that are converted and that are not."""
    torch.manual_seed(0)
    exact, x, seen = Net(), torch.randn(8, 3, 32, 32), Seen()
    model = copy.deepcopy(exact)
    only = {"filter_fn": lambda layer, name: name in ("inner", "point")} if plan == "memory" else {}
    hotrain.convert(model, "hq8" if only else "exact", memory="block", **only)
    y, got = step(torch.compile(model, backend=seen.backend), x)
    want, gradients = step(exact, x)
    assert seen.in_layout("forward", LAST) == (8, 8)
    last, count = seen.in_layout("backward", LAST)
    assert last == count >= 4
    assert type(y["maps"]) is Both
    assert [t.stride() for t in images(y)] == [t.stride() for t in images(want)]
    torch.testing.assert_close(y["rows"], want["rows"], rtol=1e-4, atol=1e-5)
    assert (got - gradients).norm() <= NEAR * gradients.norm()
    for p in model.parameters():
        assert p.grad is not None
        assert p.grad.is_contiguous()


class Maps(nn.Module):
    """An image for an image."""

    def __init__(self, width: int = 3, groups: int = 1) -> None:
        super().__init__()
        self.inner, self.maps = (nn.Conv2d(16, 16, width, padding=width // 2, groups=groups) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.maps(F.relu(self.inner(x)))


@pytest.mark.parametrize(("width", "groups"), [(3, 1), (1, 1), (3, 16)], ids=["dense", "pointwise", "depthwise"])
@pytest.mark.parametrize("chosen", ["weights", "images", "neither"])
def test_a_result_has_the_layout_that_it_has_without_hotrain(chosen: str, width: int, groups: int) -> None:
    """Also of weights with an axis of size 1, whose strides alone say in which layout they are."""
    torch.manual_seed(0)
    model, x = Maps(width, groups), torch.randn(4, 16, 32, 32)
    model.to(memory_format=LAST if chosen == "weights" else torch.contiguous_format)  # type: ignore[call-overload]
    x = x.to(memory_format=LAST if chosen == "images" else torch.contiguous_format)
    want = model(x)
    hotrain.convert(model, "exact", memory="block")
    y = torch.compile(model, backend=Seen().backend)(x)
    assert y.stride() == want.stride()
    assert y.is_contiguous() == (chosen == "neither")


class Groups(nn.Module):
    """Norms behind convolutions, the second one without γ and β."""

    def __init__(self, second: nn.Module) -> None:
        super().__init__()
        self.inner, self.first = nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(8, 32)
        self.maps, self.second = nn.Conv2d(32, 16, 3, padding=1), second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.maps(F.relu(self.first(self.inner(x)))))


def certain(model: nn.Module) -> list[Tensor | None]:
    """Gradients but those of biases in front of a norm of few channels, of which little is left but errors."""
    return [p.grad for name, p in model.named_parameters() if name not in ("inner.bias", "maps.bias")]


SECOND = {
    "codes": nn.GroupNorm(1, 16, affine=False),
    "exact": nn.GroupNorm(1, 16, affine=False),
    "exact, instances": nn.InstanceNorm2d(16),
}


@pytest.mark.parametrize("shape", [(8, 16, 512), (8, 16, 4, 16, 8), (8, 12, 32, 32)], ids=str)
@pytest.mark.parametrize("plan", ["speed", "memory"])
def test_a_batch_norm_without_a_kernel_stays_exact(
    plan: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a sequence, of a volume, of 12 channels: its codes took 1.1 to 1.9 of the time without them on an H200."""
    torch.manual_seed(0)
    kinds = {3: (nn.Conv1d, nn.BatchNorm1d), 4: (nn.Conv2d, nn.BatchNorm2d), 5: (nn.Conv3d, nn.BatchNorm3d)}
    conv, norm_of = kinds[len(shape)]
    exact = nn.Sequential(conv(shape[1], shape[1], 3), norm_of(shape[1]), conv(shape[1], 4, 1))
    model, x, seen = copy.deepcopy(exact), torch.randn(shape), Seen()
    report = hotrain.convert(model, "exact", memory="block")
    assert report.buffers is not None
    report.buffers.must_not_lose = plan == "speed"
    monkeypatch.setattr(batch_norm, "supported", lambda *_: True)
    monkeypatch.setattr(batch_norm, "is_fused", lambda *_: False)
    monkeypatch.setattr(compiled, "_choose", lambda gm: 0.0)
    y = torch.compile(model, backend=seen.backend, fullgraph=True)(x)
    y.backward(g := torch.randn_like(y))
    exact(x).backward(g)
    assert ("batch_norm" in report.buffers.full) == (plan == "speed")
    # What there is no time to pack is saved in bfloat16, with an error of 2⁻⁹; a `Conv2d` saves codes of its input.
    bound = 2.0**-8 if plan == "speed" and len(shape) != 4 else NEAR
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert p is model[0].bias or (p.grad - q.grad).norm() <= bound * q.grad.norm()  # a true gradient of zero


@pytest.mark.parametrize("case", SECOND)
def test_a_group_norm_keeps_the_layout(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's operator would copy the image to its default layout, and the gradient: ResNet-50 with such norms took
    1.55 of exact's time, whether it was in channels_last or not."""
    torch.manual_seed(0)
    plain, x, seen, exact = Groups(SECOND[case]), torch.randn(8, 16, 32, 32), Seen(), case != "codes"
    with torch.no_grad():
        plain.first.weight.uniform_(0.5, 1.5)
        plain.first.bias.normal_()
    model = copy.deepcopy(plain)
    report = hotrain.convert(model, "exact", memory="block")
    assert report.buffers is not None
    report.buffers.must_not_lose = exact
    monkeypatch.setattr(image_norm, "supported", lambda *_: exact)
    monkeypatch.setattr(image_norm, "is_fused", lambda *_: False)
    x.requires_grad_()
    g = torch.randn(8, 16, 32, 32)
    y = torch.compile(model, backend=seen.backend)(x)
    y.backward(g)
    got, x.grad = [x.grad, *certain(model)], None
    want = plain(x)
    want.backward(g)
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)
    for found, expected in zip(got, [x.grad, *certain(plain)], strict=True):
        assert found is not None
        assert expected is not None
        assert (found - expected).norm() <= NEAR * expected.norm()
    copies = [n.meta["val"] for graph in seen.graphs for n in graph.find_nodes(op="call_function", target=CLONE)]
    images = [t for t in copies if t.shape[0] == len(x) and t.dim() == 4]
    assert [t.shape for t in images if t.is_contiguous()] == [y.shape, x.shape]  # the result, and x's gradient
    assert ("group_norm" in report.buffers.full) == exact


@pytest.mark.parametrize(("groups", "affine"), [(8, True), (1, True), (32, False)])
def test_an_exact_group_norm(groups: int, affine: bool) -> None:
    """Against PyTorch's in float64; the sums over positions, 2 * 15 * 17, are in float32."""
    x = (torch.randn(2, 32, 15, 17) * 3 + 1).contiguous(memory_format=LAST)
    g = torch.randn(2, 32, 15, 17)
    given = [x, *([torch.randn(32), torch.randn(32)] if affine else [None, None])]
    mine, exact = (
        [None if t is None else t.detach().clone().to(d).requires_grad_() for t in given]
        for d in (x.dtype, torch.float64)
    )
    y = group_norm.ExactGroupNorm.apply(*mine, groups, 1e-5)
    want = F.group_norm(exact[0], groups, *exact[1:])  # type: ignore[arg-type]
    y.backward(g)
    want.backward(g.double())
    assert y.stride() == x.stride()
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)
    for t, e in zip(mine, exact, strict=True):
        if t is not None and e is not None:
            assert t.grad is not None
            assert e.grad is not None
            torch.testing.assert_close(t.grad.double(), e.grad, rtol=1e-4, atol=1e-4)


class Attended(nn.Module):
    """A block of a diffusion network, whose norm is also read as tokens."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.inner, self.norm, self.dropout = nn.Conv2d(16, 32, 3, padding=1), norm, nn.Dropout(0.1)
        self.maps, self.point = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.norm(self.inner(x))
        h = self.dropout(F.silu(y))
        return self.point(self.maps(h)), y.view(len(y), 32, -1).amax(2), h


@pytest.mark.parametrize("norm", [nn.GroupNorm(8, 32), nn.InstanceNorm2d(32)], ids=["groups", "instances"])
def test_a_norm_whose_result_is_in_the_default_layout_on_a_gpu(norm: nn.Module) -> None:
    """PyTorch's are there, in whatever layout x is: a view of one, where there is none in channels_last, raised.

    Convolutions behind, with weights in channels_last, read the norm's own image and make one in channels_last.
    """
    torch.manual_seed(0)
    model = Attended(norm).to(memory_format=LAST)
    exact, seen, x = copy.deepcopy(model), Seen(), torch.randn(8, 16, 32, 32).contiguous(memory_format=LAST)
    hotrain.convert(model, "exact", memory="block")
    y, most, h = torch.compile(model, backend=seen.backend, fullgraph=True)(x)
    (y.square().mean() + most.sum() + h.mean()).backward()
    assert y.is_contiguous(memory_format=LAST)
    assert h.is_contiguous()
    want = exact.norm(exact.inner(x))
    torch.testing.assert_close(most, want.flatten(2).amax(2), rtol=1e-4, atol=1e-4)
    kept = h != 0
    assert 0.85 < kept.double().mean() < 0.95
    torch.testing.assert_close(h[kept], (F.silu(want) / 0.9)[kept], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(y, exact.point(exact.maps(h)), rtol=1e-4, atol=1e-4)
    if isinstance(norm, nn.InstanceNorm2d):  # without kernels it stays PyTorch's
        return
    assert seen.in_layout("forward", LAST) == (6, 6)
    images = [n for n in seen.graphs[0].find_nodes(op="call_function", target=CLONE) if n.meta["val"].dim() == 4]
    assert len([n for n in images if n.meta["val"].is_contiguous()]) <= 2  # the norm's as tokens, and h, a result


@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST], ids=["default", "channels_last"])
@pytest.mark.parametrize("norm", [nn.InstanceNorm2d, nn.BatchNorm2d])
def test_running_statistics_move_once(norm: Any, layout: torch.memory_format) -> None:
    """Instance norms' moved twice: a result that was not in channels_last was computed again."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(16, 32, 3), norm(32, track_running_stats=True), nn.ReLU())
    exact, x = net.to(memory_format=layout), torch.randn(8, 16, 32, 32).contiguous(memory_format=layout)
    model = copy.deepcopy(exact)
    hotrain.convert(model, "exact", memory="block")
    compiled_model = torch.compile(model, backend=Seen().backend)
    for _ in range(2):
        torch.testing.assert_close(compiled_model(x), exact(x), rtol=1e-4, atol=1e-4)
    for got, want in zip(model[1].buffers(), exact[1].buffers(), strict=True):
        torch.testing.assert_close(got, want)


def test_a_result_of_transformers_is_in_the_default_layout() -> None:
    """Its logits are an entry of a mapping and an attribute of it."""
    output = pytest.importorskip("transformers.modeling_outputs").SemanticSegmenterOutput

    class Segments(Maps):
        def forward(self, x: Tensor) -> Any:
            return output(logits=super().forward(x))

    model = Segments()
    hotrain.convert(model, "exact", memory="block")
    y = torch.compile(model, backend=Seen().backend)(torch.randn(4, 16, 32, 32))
    assert type(y) is output
    assert y.logits.is_contiguous()
    assert y["logits"] is y.logits


class Block(nn.Module):
    """A residual block as torchvision's and timm's, with functions in place."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(32, 32, 3, padding=1, bias=False) for _ in range(2))
        self.first, self.second, self.f = nn.BatchNorm2d(32), nn.BatchNorm2d(32), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.second(self.two(self.f(self.first(self.one(x)))))
        x += shortcut
        return self.f(x)


def test_what_nothing_reads_in_the_default_layout_is_not_computed() -> None:
    """Of blocks only the image, the weights and what the caller gets are copied."""
    torch.manual_seed(0)
    exact, seen = nn.Sequential(nn.Conv2d(16, 32, 3), Block(), Block(), Block()), Seen()
    model, x = copy.deepcopy(exact), torch.randn(8, 16, 34, 34)
    hotrain.convert(model, "exact", memory="block")
    y = torch.compile(model, backend=seen.backend)(x)
    y.backward(g := torch.randn_like(y))
    want = exact(x)
    want.backward(g)
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)
    copies = [n.meta["val"] for graph in seen.graphs for n in graph.find_nodes(op="call_function", target=CLONE)]
    assert sorted(t.is_contiguous() for t in copies if t.shape[0] == len(x)) == [False, True]  # x, y
    assert seen.in_layout("forward", LAST) == (14, 14)
    last, count = seen.in_layout("backward", LAST)
    assert last == count >= 7
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert p.dim() < 4 or (p.grad - q.grad).norm() <= NEAR * q.grad.norm()


@torch.library.custom_op("hotrain_tests::flat", mutates_args=())
def flat(x: Tensor) -> Tensor:
    """An operator that reads memory, as those of Triton and C++ do."""
    return torch.as_strided(x, (x.numel(),), (1,)).clone()


@flat.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.numel())


def _mask(h: Tensor) -> Tensor:
    mask = torch.zeros_like(h)
    return h * mask.view(len(h), -1).scatter_(1, h.detach().view(len(h), -1).topk(100, 1)[1], 1.0).view_as(h)


def _masked(h: Tensor) -> Tensor:
    mask = torch.zeros_like(h)
    mask.view(len(h), -1).scatter_(1, h.detach().view(len(h), -1).topk(100, 1)[1], 1.0)
    return h * mask


def _through_a_view(h: Tensor) -> Tensor:
    h = h * 1
    h.view(-1)[::3] = 0
    h.flatten(1).clamp_(-2, 2)
    h.contiguous().mul_(2.0)
    return h


def _statistics(h: Tensor) -> Tensor:
    with torch.no_grad():
        size = h.view(len(h), -1).std(1)
    return h / size.view(-1, 1, 1, 1)


def _hook(h: Tensor) -> Tensor:
    h = torch.relu(h)
    h.register_hook(lambda g: 3 * g.view(len(g), -1).view(g.shape))
    return h


def _by_its_old_name(h: Tensor) -> Tensor:
    old = h
    h = F.silu(h + 0, inplace=True)
    old = old + 0
    other = old
    other += 1.0
    other.relu_()
    return h + old


def _written_twice(h: Tensor) -> Tensor:
    h = h + 0
    other = h.add_(h.detach() * 0.5)
    other.mul_(2)
    F.silu(h, inplace=True)
    return h


def _mixed(h: Tensor) -> Tensor:
    tokens = h.flatten(2).transpose(1, 2).contiguous()
    return (tokens.transpose(1, 2).view(h.shape) + h).permute(0, 2, 3, 1).view(len(h), -1, 32)


class Doubled(torch.autograd.Function):
    """Its gradient is read as rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return (2 * g.view(len(g), -1)).view(g.shape)


def _doubled_inside(t: Tensor) -> Tensor:
    with torch.no_grad():
        t.mul_(2)
    return t.mean()


def _written_in_a_checkpoint(h: Tensor) -> Tensor:
    h = h + 0
    return checkpoint(_doubled_inside, h, use_reentrant=False) + h


def _small(h: Tensor) -> Tensor:
    h = F.max_pool2d(h, 8)
    h.mul_(-1)
    return F.silu(h)


def _bits(h: Tensor) -> Tensor:
    h = h * 1
    with torch.no_grad():
        h.view(torch.int32).bitwise_and_(0x7FFFFFFF)
        torch.view_as_complex(h.view(8, 32, 16, 8, 2)).mul_(2.0)
    return h


def _two_hooks(h: Tensor) -> Tensor:
    for f in (torch.relu, torch.exp):
        h = f(h)
        h.register_hook(lambda g: 2 * g.view(len(g), -1).view(g.shape))
    return h


def _places(h: Tensor) -> Tensor:
    y, places = F.max_pool2d(h, 2, return_indices=True)
    return y.view(len(h), -1) + places.view(len(h), -1) % 3


INSIDE: dict[str, Callable[[Tensor], Tensor]] = {
    "autograd function": lambda h: Doubled.apply(F.relu(h)),
    "written in a checkpoint": _written_in_a_checkpoint,
    "small": _small,
    "bits": _bits,
    "two hooks": _two_hooks,
    "places": _places,
    "one position": lambda h: F.interpolate(F.avg_pool2d(F.relu(h), 16), size=(8, 8), mode="bilinear").view(8, -1),
    "rows by a view": lambda h: torch.linspace(0, 1, 8192).view(16, 16, 32).permute(2, 0, 1) + h,
    "mask": _mask,
    "mask by a view": _masked,
    "writes through views": _through_a_view,
    "statistics": _statistics,
    "hook": _hook,
    "old name": _by_its_old_name,
    "written twice": _written_twice,
    "another layout": _mixed,
    "strides": lambda h: h.as_strided((8, 32, 256), (8192, 256, 1)) * (1 if h.is_contiguous() else 2),
    "halves": lambda h: h.chunk(2, 1)[0].relu(),
    "complex": lambda h: torch.view_as_complex(h.view(8, 32, 16, 8, 2)).abs(),
    "low rank of views": lambda h: h.flatten(2)[0].view(-1) * h[1].view(-1),
    "by vmap": lambda h: torch.vmap(lambda t: t.view(-1) * 2)(h),
    "checkpoint": lambda h: checkpoint(lambda t: t.view(len(t), -1).tanh(), h, use_reentrant=False),
    "operator": lambda h: torch.ops.hotrain_tests.flat(h.detach()) * h.view(-1),
    "promoted in place": lambda h: h.clone().add_(h.double(), alpha=2),
}


class Inside(nn.Module):
    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.f, self.first, self.norm = f, nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.second = nn.Conv2d(32, 32, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.first(x))
        self.seen = x
        y = self.f(x)
        return (self.second(y) if y.shape == x.shape else y), x


@pytest.mark.parametrize("name", INSIDE)
def test_what_a_model_does_with_an_image_is_done_to_its_own(name: str) -> None:
    """Results in channels_last were what the model saw first: masks stayed zero, views failed, hooks saw a part."""
    torch.manual_seed(0)
    exact, x = Inside(INSIDE[name]), torch.randn(8, 16, 16, 16)
    model = copy.deepcopy(exact)
    hotrain.convert(model, "exact", memory="block")
    (y, h), (want, wanted) = torch.compile(model, backend=Seen().backend)(x), exact(x)
    g = torch.randn_like(want)
    for out, image in ((y, h), (want, wanted)):
        (out * g).sum().backward(retain_graph=True)
        assert image.is_contiguous()
    assert y.stride() == want.stride()
    assert model.seen.is_contiguous()
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None and q.grad is not None and p is not model.first.bias:  # in front of a norm: errors alone
            assert (p.grad - q.grad).norm() <= NEAR * q.grad.norm()


def test_a_hook_behind_a_reader_is_refused() -> None:
    """It would see only a part of the gradient; where the graph may break, the model runs in eager mode."""

    def late(h: Tensor) -> Tensor:
        h = F.relu(h)
        y = F.silu(h)
        h.register_hook(lambda g: 3 * g)
        return y + h

    torch.manual_seed(0)
    exact, x = Inside(late), torch.randn(8, 16, 16, 16)
    model = copy.deepcopy(exact)
    hotrain.convert(model, "exact", memory="block")
    with pytest.raises(Exception, match="hook"):
        torch.compile(model, backend=Seen().backend, fullgraph=True)(x)


def test_without_compressed_buffers_nothing_is_laid_out() -> None:
    """There is no mode, which keeps the layout from what follows a layer."""
    torch.manual_seed(0)
    model, x, seen = Net(), torch.randn(8, 3, 32, 32), Seen()
    hotrain.convert(model, "hq8", memory="linear")
    step(torch.compile(model, backend=seen.backend), x)
    assert seen.in_layout("forward", torch.contiguous_format) == (8, 8)

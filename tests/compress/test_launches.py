"""The operators of one kernel each, and the mode that calls them: the definition's numbers, one launch a norm, and
nothing of it where the kernels do not support.

The kernels run in Triton's interpreter, or on a GPU where there is one.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from operator_cases import with_operators
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

import hotrain
from hotrain import autograd, kernels
from hotrain.compress import choosing, compiled, costs, exact_norms, rematerialize, sharing
from hotrain.compress import codes as packing
from hotrain.compress.formats import FORMATS, GROUPED
from hotrain.compress.operators.activation import Curve
from hotrain.compress.slopes import ACTIVATIONS
from hotrain.planning import Roofs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAST = torch.channels_last
# numpy, of which the interpreter is made, warns of infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
# float32 in another order, with approximate exponentials.
CLOSE = 2.0**-20
# Of gradients that are the same but for that, against their size.
SAME = 1e-5
# The same, of slopes in levels of 0.1 of which one in a hundred is another for GELU (`test_buffers`): √0.01 of a level,
# twice. Of the others one or two in a thousand may be.
MOVED = {"gelu": 0.02, "gelu_tanh": 5e-3, "silu": 5e-3, "hardswish": 5e-3}
# Of a step with codes against the exact one: 0.10 to 0.13 were measured; twice the largest.
NEAR = 0.26

# The operators, each with the definition inside.
DEFINITION = SimpleNamespace(buffers_reason=kernels.buffers_reason, run=lambda name, reference, *args: reference())


@pytest.fixture(autouse=True)
def _small(small_tensors_too: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "SMALL", 2)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch._dynamo.reset()


@contextlib.contextmanager
def using(found: Any) -> Iterator[None]:
    """With these kernels, None for none: operators and the mode then follow the definition."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autograd, "KERNELS", {} if found is None else dict.fromkeys(("cpu", "cuda"), found))
        yield


class Calls(TorchDispatchMode):
    """Counts the operators of hotrain that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "hotrain":
            self.names[func._opname] += 1
        return func(*args, **(kwargs or {}))


def draw(*shape: int, seed: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


# ---- codes, and their values ----


def kept(form: str, *shape: int, seed: int = 3) -> list[Tensor | None]:
    return list(GROUPED[form].keep(draw(*shape, seed=seed) * 2))


ROW, GROUPS = "int4 nearest/row", "int4 nearest"
SHAPE = (2, 7, 96)


def _norm(w: bool, b: bool, form: str = ROW, cast: bool = False, seed: int = 3) -> tuple[str, list[Tensor | None]]:
    gamma, beta = draw(96, seed=8) if w else None, draw(96, seed=9) if b else None
    return rematerialize.normed(form, (96,), cast=cast), [*kept(form, *SHAPE, seed=seed), gamma, beta]


def _of(name: str, inner: tuple[str, list[Tensor | None]]) -> tuple[str, list[Tensor | None]]:
    return rematerialize.of(name, inner[0]), inner[1]


def _product(a: tuple[str, list[Tensor | None]], b: tuple[str, list[Tensor | None]]) -> tuple[str, list[Tensor | None]]:
    return rematerialize.product(a[0], b[0]), a[1] + b[1]


def _values(form: str = GROUPS, columns: int = 96, seed: int = 3) -> tuple[str, list[Tensor | None]]:
    return rematerialize.values(form, (columns,)), kept(form, 2, 7, columns, seed=seed)


def _image(name: str = "", normed: bool = False, channels: int = 96) -> tuple[str, list[Tensor | None]]:
    recipe, given = rematerialize.values(ROW, (2, channels), True), kept(ROW, 2, 3, 5, channels)
    if normed:
        recipe = rematerialize.normed(ROW, (2, channels), image=True)
        given = [*given, draw(channels, seed=8), draw(channels, seed=9)]
    return rematerialize.of(name, recipe) if name else recipe, given


# name → (recipe and what it uses up, shape)
Made = tuple[Callable[[], tuple[str, list[Tensor | None]]], tuple[int, ...]]
SERVED: dict[str, Made] = {
    "values": (_values, SHAPE),
    "values in another shape of the same order": (_values, (14, 6, 16)),
    "several groups a row": (lambda: _values(GROUPS, 256), (2, 7, 256)),
    "a norm": (lambda: _norm(True, True), SHAPE),
    "a norm without β": (lambda: _norm(True, False), SHAPE),
    "a norm without γ": (lambda: _norm(False, True), SHAPE),
    "a plain norm": (lambda: _norm(False, False), SHAPE),
    "a norm that is rounded before γ": (lambda: _norm(True, False, cast=True), SHAPE),
    **{f"{name} of values": (functools.partial(lambda name: _of(name, _values()), name), SHAPE)
       for name in kernels.FUNCTIONS if name},
    **{f"{name} of a norm": (functools.partial(lambda name: _of(name, _norm(True, True)), name), SHAPE)
       for name in kernels.FUNCTIONS if name},
    "SwiGLU": (lambda: _product(_of("silu", _values()), _values(seed=4)), SHAPE),
    "GEGLU": (lambda: _product(_of("gelu", _values("int8", 256)), _values(GROUPS, 256, seed=4)), (2, 7, 256)),
    "product of four and eight bits": (lambda: _product(_values(), _of("gelu_tanh", _values("int8", seed=4))), SHAPE),
    "product of two norms": (lambda: _product(_norm(True, True), _of("relu", _norm(False, True, seed=4))), SHAPE),
    "eight bits": (lambda: _values("int8"), SHAPE),
    "GELU of eight bits": (lambda: _of("gelu", _values("int8", 256)), (2, 7, 256)),
    "an image": (_image, (2, 96, 3, 5)),
    "an image's norm": (lambda: _image("", True), (2, 96, 3, 5)),
    "an image's norm and ReLU": (lambda: _image("relu", True), (2, 96, 3, 5)),
    "an image's norm, 72 channels": (lambda: _image("relu", True, 72), (2, 72, 3, 5)),
}  # fmt: skip
UNSERVED: dict[str, Made] = {
    "groups that do not fill the rows": (lambda: _values(GROUPS, 197), (2, 7, 197)),
    "a function that the kernels lack": (lambda: _of("mish", _values()), SHAPE),
    "a function of a function": (lambda: _of("relu", _of("gelu", _values())), SHAPE),
    "a product of three": (lambda: _product(_product(_values(), _values(seed=4)), _values(seed=5)), SHAPE),
    "a function of a product": (lambda: _of("relu", _product(_values(), _values(seed=4))), SHAPE),
    "a product of other groups": (lambda: _product(_values(GROUPS), _values(ROW, seed=4)), SHAPE),
}


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_made_by_the_kernel_is_what_the_recipe_makes(name: str, dtype: torch.dtype) -> None:
    """Values, dtype and order in memory. In a lower dtype the recipe rounds up to three times on the way, the kernel
    once (in the interpreter it cuts bfloat16 off): four units of the result, or of 1 where entries cancel."""
    build, shape = SERVED[name]
    recipe, given = build()
    want = rematerialize.make(recipe, given, shape, dtype)
    with using(kernels), Calls() as calls:
        got = packing.whole(recipe, given, shape, dtype)
    assert calls.names == {"restore_codes": 1}
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert got.is_contiguous(memory_format=LAST if rematerialize.is_image(recipe) else torch.contiguous_format)
    unit = CLOSE if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    if name == "GEGLU":
        unit *= 32  # Φ's 1e-7 times both factors, where Φ is near zero
    assert ((got.double() - want.double()).abs() <= unit * (1 + want.double().abs())).all()


@pytest.mark.parametrize("name", UNSERVED)
def test_an_unsupported_recipe_is_made_as_before(name: str) -> None:
    build, shape = UNSERVED[name]
    recipe, given = build()
    with using(kernels), Calls() as calls:
        got = packing.whole(recipe, given, shape, torch.float32)
    assert not calls.names
    assert torch.equal(got, rematerialize.make(recipe, given, shape, torch.float32))


def test_what_only_the_tensors_tell_is_made_as_before() -> None:
    """γ of a norm over two axes is a matrix, which the recipe does not say; float64 has no kernel."""
    recipe, given = rematerialize.normed(ROW, (16,)), kept(ROW, 3, 6, 16)
    given += [draw(6, 16, seed=8), draw(6, 16, seed=9)]
    vectors = [*given[:2], draw(16, seed=8), None]
    for tensors, dtype in ((given, torch.float32), (vectors, torch.float64)):
        with using(kernels):
            got = packing.whole(recipe, tensors, (3, 6, 16), dtype)
        assert torch.equal(got, rematerialize.make(recipe, tensors, (3, 6, 16), dtype))


@pytest.mark.parametrize(
    ("form", "t", "supports"),
    [
        (GROUPS, lambda: draw(2, 7, 96), True),
        (ROW, lambda: draw(2, 7, 48), True),
        ("int8", lambda: draw(2, 7, 3, 4, 32).unbind(2)[1], True),
        ("int8", lambda: draw(2, 7, 4, 32).transpose(1, 2), False),  # heads before tokens are not in rows
        (GROUPS, lambda: draw(2, 7, 197), False),  # its last group is padded
        (GROUPS, lambda: draw(2, 7, 96).double(), False),
    ],
)
def test_codes_are_the_formats_by_whichever_way(form: str, t: Callable[[], Tensor], supports: bool) -> None:
    """No entry of these is so near to a half that a reciprocal moves it (`test_buffers` has those that may be)."""
    x = t()
    with using(kernels), Calls() as calls:
        got = packing.pack(x, form)
    assert calls.names == ({"keep_codes": 1} if supports else {})
    assert all(torch.equal(a, b) for a, b in zip(got, GROUPED[form].keep(x), strict=True))


def _norm_arguments(name: str, shortcut: bool, w: bool) -> tuple[Any, ...]:
    x, other = (draw(2, 32, 3, 5, seed=seed).contiguous(memory_format=LAST) for seed in (3, 4))
    mean, r = x.mean((0, 2, 3)), x.var((0, 2, 3)).rsqrt()
    gamma, beta = (draw(32, seed=5), draw(32, seed=6)) if w else (None, None)
    return x, mean, r, gamma, beta, other if shortcut else None, name


@pytest.mark.parametrize("which", ["kernels", "definition"])
@pytest.mark.parametrize("name", ["", "relu", "gelu"])
def test_a_compiler_is_told_the_truth(name: str, which: str) -> None:
    """Shapes, dtypes and strides that the fakes of the operators promise are those of the results."""
    check = functools.partial(torch.library.opcheck, test_utils=("test_schema", "test_faketensor"))
    ops = torch.ops.hotrain
    with using(kernels if which == "kernels" else None):
        check(ops.keep_codes.default, (draw(2, 7, 256), GROUPS))
        check(ops.keep_codes.default, (draw(2, 7, 256), GROUPS, -1.0))
        if name == "gelu":
            check(ops.activate.default, (draw(2, 7, 48), name, "int8", None))
            check(ops.activate.default, (draw(2, 7, 48, dtype=torch.bfloat16), name, "int8", draw(48)))
            g, (_, *codes) = draw(2, 7, 48), ops.activate(draw(2, 7, 48), name, "int8", None)
            for sums in (False, True):
                check(ops.activation_gradient.default, (g, *codes, name, "int8", sums))
        for build, shape in (SERVED["values"], SERVED["an image's norm"]):
            recipe, given = build()
            check(ops.restore_codes.default, (given, recipe, list(shape), torch.float32))
        for shortcut in (False, True):
            arguments = _norm_arguments(name, shortcut, not shortcut)
            check(ops.channel_statistics.default, arguments[:1])
            check(ops.normalize.default, arguments)
            y, *codes = ops.normalize(*arguments)
            for other in (None, y):
                check(ops.norm_gradient.default, (y, other, *codes, arguments[2], arguments[3], name, shortcut))


@pytest.mark.parametrize("name", kernels.FUNCTIONS)
@pytest.mark.parametrize("shortcut", [False, True], ids=["", "shortcut"])
def test_gradients_of_the_operator(name: str, shortcut: bool) -> None:
    """With kernels as with the definition, but for the slopes that are a level apart."""
    steps = []
    for found in (kernels, DEFINITION):
        x, mean, r, w, b, other, _ = _norm_arguments(name, shortcut, True)
        leaves = [t.requires_grad_() for t in (x, w, b, other) if t is not None]
        with using(found), Calls() as calls:
            y = torch.ops.hotrain.normalized(x, mean, r, w, b, other, name)[0]
            steps.append([y.detach(), *torch.autograd.grad(y, leaves, draw(*y.shape, seed=7))])
        assert calls.names["normalize"] == calls.names["norm_gradient"] == 1
    assert distance(steps[0][:1], steps[1][:1]) <= SAME
    assert distance(steps[0][1:], steps[1][1:]) <= MOVED.get(name, SAME)


# ---- functions in eager ----

INPUTS = {
    "tokens": (lambda: draw(2, 7, 48), False),
    "channels-last": (lambda: draw(2, 16, 5, 3).contiguous(memory_format=LAST), True),
    "a transposed matrix": (lambda: draw(48, 6).T, False),
    "a number of channels that no kernel takes": (lambda: draw(2, 7, 5), False),
}


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "hardswish"])
@pytest.mark.parametrize("form", ["int8", "int4 nearest"])
@pytest.mark.parametrize("how", INPUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_function_that_keeps_its_input_in_eager(name: str, form: str, how: str, dtype: torch.dtype) -> None:
    """Its gradient is that of the formula at the codes' values, to a few roundings, and for GELU, whose derivative in
    PyTorch's operations is its tanh form's, to 0.001 of g_y."""
    build, image = INPUTS[how]
    x = build().to(dtype).detach().requires_grad_()
    g = draw(*x.shape, seed=5, dtype=dtype)
    if image:
        g = g.contiguous(memory_format=LAST)
    with using(kernels), Calls() as calls:
        y, codes, scale = Curve.apply(x, name, form, image)
        (got,) = torch.autograd.grad(y, x, g)
    assert calls.names["activate"] == 0, "f is PyTorch's"
    assert torch.equal(y, ACTIVATIONS[name].f(x))
    assert calls.names["keep_codes"] == (how in ("tokens", "channels-last"))
    assert calls.names["activation_gradient"] == ("no kernel" not in how)
    exact = x.detach().double().movedim(1, -1) if image else x.detach().double()
    at = rematerialize.restore(GROUPED[form], (codes, scale), exact.shape, torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(ACTIVATIONS[name].f(at).sum(), at)
    got, g = (t.movedim(1, -1) if image else t for t in (got, g))
    unit = 2 * torch.finfo(dtype).eps
    # The scale of a group is bfloat16: its largest entry is at most a step and a half from its code.
    step = exact.abs().amax() / (127 if form == "int8" else 7)
    assert ((at - exact).abs() <= (0.75 if form == "int8" else 0.55) * step + CLOSE).all()
    assert (
        (got.double() - slope * g.double()).abs() <= g.double().abs() * ((0.001 if name == "gelu" else 1e-5) + 2 * unit)
    ).all()


@pytest.mark.parametrize("name", [name for name, kind in ACTIVATIONS.items() if kind.least is not None])
@pytest.mark.parametrize("which", ["kernels", "definition"])
@pytest.mark.parametrize("beside", [1.0, 20.0, 200.0, 3e4])
def test_a_mask_is_not_the_scale_of_its_group(beside: float, which: str, name: str) -> None:
    """f and f' are zero there by its code, too, also where a large element makes the code coarse."""
    kind = ACTIVATIONS[name]
    form = FORMATS[kind.by_input]
    x = draw(2, 7, 96)
    x[0, ::2, 9], x[0, :, 5] = -1e9, beside
    masked = x == -1e9
    least = x.where(~masked, min(kind.least, -beside / GROUPED[form].top))
    with using(kernels if which == "kernels" else None):
        y, *codes = Curve.apply(x, name, form, False)
        made, *fused = torch.ops.hotrain.activate(x, name, form, None)
        assert torch.equal(y, kind.f(x))
        assert (made - y).abs().max() < CLOSE * 20
        want = packing.pack(least, form)
    for got in (codes, fused):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    back = GROUPED[form].restore(codes, x.shape, torch.float32)
    # Rounded, it is half a step nearer to 0: SiLU of -7 beside 20 is that of -5.6.
    rounded = torch.tensor(min(kind.least, -beside / GROUPED[form].top) + beside / GROUPED[form].top / 2)
    for f in (kind.f, kind.slope):
        assert f(back)[masked].abs().max() < max(2**-7, f(rounded).abs().item())


@pytest.mark.parametrize("form", ["int8", "int4 nearest"])
def test_codes_of_a_transposed_sample_are_read_by_the_kernels(form: str) -> None:
    """Their formula works in the order of x's memory, in which one sample is a transposed matrix."""
    x = draw(1, 48, 7).mT.requires_grad_()
    with using(kernels), Calls() as calls:
        y, *codes = Curve.apply(x, "silu", form, False)
        recipe = rematerialize.of("silu", rematerialize.values(form, tuple(x.shape), False))
        made = packing.whole(recipe, codes, x.shape, torch.float32)
    assert calls.names["restore_codes"] == 1
    assert (made - y).norm() <= (0.02 if form == "int8" else 0.2) * y.norm()


def test_eager_gelu_is_pytorchs_and_its_codes_are_the_kernels() -> None:
    x = draw(2, 7, 48).requires_grad_()
    with using(kernels), Calls() as calls:
        for call in (F.gelu, functools.partial(F.gelu, approximate="tanh")):
            assert torch.equal(with_operators(call, x), call(x))
    assert (calls.names["activate"], calls.names["keep_codes"]) == (0, 2)


# ---- compiled: batch norm, what is added, and the function behind ----


class Net(nn.Module):
    """A convolution, a batch norm and what `call` does with them."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor], channels: int = 32, **options: Any) -> None:
        super().__init__()
        self.call = call
        self.conv = nn.Conv2d(16, channels, 3, padding=1, bias=False)
        self.norm, self.norm2 = nn.BatchNorm2d(channels, **options), nn.BatchNorm2d(channels, **options)
        self.out = nn.Conv2d(channels, 16, 1)
        for norm in (self.norm, self.norm2):
            if norm.affine:
                nn.init.uniform_(norm.weight, 0.5, 1.5)
                nn.init.normal_(norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def _behind(f: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, x: m.out(f(m.norm(m.conv(x))))


def _added(add: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Of (the norm's result, the shortcut)."""

    def call(m: Any, x: Tensor) -> Tensor:
        c = m.conv(x)
        return m.out(F.relu(add(m.norm(c), c * 1.5)))

    return call


def _iadd(a: Tensor, b: Tensor) -> Tensor:
    a += b
    return a


def _added_norm(m: Any, x: Tensor) -> Tensor:
    c = m.conv(x)
    return m.out(F.relu(_iadd(m.norm(c), m.norm2(c * 2)), inplace=True))


def _block(m: Any, x: Tensor) -> Tensor:
    c = F.relu(m.norm(m.conv(x)), inplace=True)
    return m.out(F.relu(m.norm2(c * 1.5) + c))


def _three(m: Any, x: Tensor) -> Tensor:
    c = F.relu(m.norm(m.conv(x)))
    return m.out(F.relu(m.norm2(c * 1.5) + c) + c * 0.5)


def _scaled(t: Tensor) -> Tensor:
    return F.relu(t.mul_(2))


def _sum_of_written(m: Any, x: Tensor) -> Tensor:
    c = m.conv(x)
    shortcut = c * 1.5
    y = m.norm(c) + shortcut
    shortcut.mul_(3)
    return m.out(F.relu(y) + shortcut)


def _both(m: Any, x: Tensor) -> Tensor:
    y = m.norm(m.conv(x))
    return m.out(F.relu(y)) + m.out(y)


def _sum_of_both(m: Any, x: Tensor) -> Tensor:
    c = m.conv(x)
    y = m.norm(c) + c
    return m.out(F.relu(y) + y)


# name → (what the model does, what is behind each `normalize` of its graph). "" is the norm's own result.
FUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], list[str]]] = {
    "ReLU": (_behind(F.relu), ["relu"]),
    "ReLU in place": (_behind(functools.partial(F.relu, inplace=True)), ["relu"]),
    "ReLU6": (_behind(F.relu6), ["relu6"]),
    "+=": (_added(_iadd), ["relu"]),
    "norm + shortcut": (_added(lambda a, b: a + b), ["relu"]),
    "shortcut + norm": (_added(lambda a, b: b + a), ["relu"]),
    "torch.add": (_added(torch.add), ["relu"]),
    "add_": (_added(Tensor.add_), ["relu"]),
    "the shortcut is a norm's result": (_added_norm, ["", "relu"]),
    "a block": (_block, ["relu", "relu"]),
    "a convolution alone": (_behind(lambda y: y), [""]),
    # From here on something is not fused, or the norm's own result is asked for as well.
    "read by ReLU and by a convolution": (_both, ["", "relu"]),
    "a sum read by ReLU and by a sum": (_sum_of_both, ["", "relu"]),
    "the norm's result twice": (_behind(lambda y: F.relu(y + y)), ["", "relu"]),
    "written to before ReLU": (_behind(_scaled), [""]),
    "the shortcut written to before ReLU": (_sum_of_written, [""]),
    "a multiple added": (_added(functools.partial(torch.add, alpha=2)), [""]),
    "a shortcut of another dtype": (_added(lambda a, b: a + b.bfloat16()), [""]),
    "a shortcut in channels-first": (_added(lambda a, b: a + b.contiguous()), [""]),
    "a shortcut of other rows": (_added(lambda a, b: a + b.mean((2, 3), keepdim=True)), [""]),
    "a function that the kernels lack": (_behind(F.mish), [""]),
}
# What is written to here is the shortcut: what is added then may not be read from it again.
INTO_THE_SHORTCUT = {
    "shortcut += norm": _added(lambda a, b: _iadd(b, a)),
    "shortcut.add_(norm)": _added(lambda a, b: b.add_(a)),
    "norm += itself": _behind(lambda y: F.relu(_iadd(y, y))),
    "norm += a view of itself": _behind(lambda y: F.relu(_iadd(y, y.view_as(y)))),
    "norm += itself, detached": _behind(lambda y: F.relu(_iadd(y, y.detach()))),
}


class Step:
    """One step of a model: y, gradients, buffers, and how its graph's norms end; with `counts`, the bytes kept."""

    def __init__(self, model: Any, found: Any, backend: Any = None, counts: bool = False) -> None:
        """backend: None for one that looks at the graph, "" for eager."""
        self.behind: list[str] = []
        torch._dynamo.reset()
        run: Any = model if backend == "" else torch.compile(model, backend=backend or self.backend(), fullgraph=True)
        x = image().requires_grad_()
        with using(found):
            y = run(x)
            (y * draw(*y.shape, seed=5)).sum().backward()
            self.buffers = {name: t.clone() for name, t in model.named_buffers()}
            self.bytes = hotrain.saved_bytes(run, x).total if counts else 0
        self.y, self.gradients = y.detach(), [x.grad, *(p.grad for p in model.parameters())]

    def backend(self) -> Any:
        def look(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            for node in graph.graph.nodes:
                if node.target == torch.ops.hotrain.normalize.default:
                    self.behind.append(node.args[6])
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=look, bw_compiler=look, partition_fn=min_cut_rematerialization_partition)


def converted(build: Callable[[], Any], memory: bool = True) -> Any:
    torch.manual_seed(0)
    model = build().train().to(DEVICE, memory_format=LAST)
    if memory:
        hotrain.convert(model, "exact", memory="block")
    return model


def image() -> Tensor:
    return draw(2, 16, 6, 5).contiguous(memory_format=LAST)


def distance(got: Sequence[Tensor | None], want: Sequence[Tensor | None]) -> float:
    """Of all gradients together, against their size; the same ones must be there."""
    assert [t is None for t in got] == [t is None for t in want]
    a, b = (torch.cat([t.flatten() for t in ts if t is not None]) for ts in (got, want))
    return float((a - b).norm() / b.norm())


def eager(build: Callable[[], Any], counts: bool = False) -> Step:
    """Without kernels, and without a compiler's help."""
    return Step(converted(build), None, "", counts)


def assert_same(step: Step, other: Step, build: Callable[[], Any], gradient: float = SAME) -> None:
    """The result is the exact one, gradients the other step's and near the exact ones, and statistics move alike."""
    exact = Step(converted(build, memory=False), None, "")
    assert distance([step.y], [exact.y]) <= SAME
    assert distance(step.gradients, other.gradients) <= gradient
    assert distance(step.gradients, exact.gradients) <= NEAR
    assert step.buffers.keys() == other.buffers.keys()
    for name, t in step.buffers.items():
        torch.testing.assert_close(t, other.buffers[name], rtol=SAME, atol=SAME, msg=name)


@pytest.mark.parametrize("name", FUSED)
def test_a_norm_and_what_is_behind_are_one_operator(name: str) -> None:
    """In the graph as often as it says, with the gradients of the same model without kernels, and no more kept: 1 %
    are whole bytes of bits. Two readers of a norm's results have codes of x̂ each."""
    call, behind = FUSED[name]
    build = functools.partial(Net, call)
    step, other = Step(converted(build), kernels, counts=True), eager(build, counts=True)
    assert sorted(step.behind) == behind
    assert_same(step, other, build)
    assert other.bytes > 0
    if not {"", "relu"} <= set(behind):
        assert step.bytes <= 1.01 * other.bytes


def _as_it_is(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
    return make_boxed_func(graph.forward)


class JointStep(Step):
    """A step with our partitioner, which notes of each norm's gradient whether it adds another."""

    def backend(self) -> Any:
        self.added: list[bool] = []

        def look(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            for node in graph.graph.nodes:
                if node.target is torch.ops.hotrain.norm_gradient.default:
                    self.added.append(node.args[1] is not None)
                elif torch.ops.hotrain.norm_gradient_.default in node.args:  # one that writes over its gradient
                    self.added.append(node.kwargs["other"] is not None)
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=look, bw_compiler=look, partition_fn=compiled.partition)


@pytest.mark.parametrize(
    ("call", "added"),
    # The first norm's result has two readers, then three, of which two are added before, then one.
    [(_block, [False, True]), (_three, [False, True]), (_behind(F.relu), [False])],
    ids=["a block", "three readers", "no joint"],
)
def test_the_gradients_of_two_readers_are_added_in_the_kernel(
    call: Callable[[Any, Tensor], Tensor], added: list[bool]
) -> None:
    build = functools.partial(Net, call)
    step = JointStep(converted(build), kernels)
    assert step.added == added
    assert_same(step, eager(build), build)


class PreNorm(nn.Module):
    """Blocks x + conv(norm(x)); autocast casts the result of a norm in float32 for the convolution."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.stem, self.out = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 16, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(32) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            x = self.stem(x).to(self.dtype)
            for norm, conv in zip(self.norms, self.convs, strict=True):
                x = x + conv(norm(x))
            return self.out(x).float()


class MergedStep(Step):
    """A step that notes the dtypes that norms' operators are given, and whether one adds to g_x."""

    def backend(self) -> Any:
        self.results: list[Any] = []
        self.gradients_of_x: list[tuple[Any, bool]] = []

        def look(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            for node in graph.graph.nodes:
                if node.target is torch.ops.hotrain.normalize.default:
                    self.results.append(dict(enumerate(node.args)).get(7))
                elif node.target is torch.ops.hotrain.norm_gradient.default:
                    given = dict(enumerate(node.args))
                    self.gradients_of_x.append((given.get(9), given.get(10) is not None))
                elif torch.ops.hotrain.norm_gradient_.default in node.args:
                    self.gradients_of_x.append((node.kwargs.get("g_x"), node.kwargs.get("after") is not None))
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=look, bw_compiler=look, partition_fn=compiled.partition)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_before_a_branch_casts_and_adds_in_its_kernels(dtype: torch.dtype) -> None:
    """Of a float32 stream y is written in bfloat16 and g is read in it; the shortcut's gradient is added to g_x.

    Rounded to bfloat16, g_x is added before it is and not after, so gradients of two steps differ by such roundings.
    """
    build = functools.partial(PreNorm, dtype)
    definition = SimpleNamespace(**vars(DEFINITION), inlines=kernels.inlines)
    # The interpreter truncates what the definition rounds.
    step, other, without = MergedStep(converted(build), kernels), MergedStep(converted(build), definition), eager(build)
    wide = dtype == torch.float32
    assert step.results == other.results == [torch.bfloat16 if wide else None] * 2
    assert step.gradients_of_x == other.gradients_of_x == [(torch.float32 if wide else None, True)] * 2
    assert distance(other.gradients, without.gradients) <= 2.0**-7
    exact = Step(converted(build, memory=False), None, "")
    assert distance(step.gradients, exact.gradients) <= NEAR


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_was_merged_with_a_norm_is_there_when_it_is_put_back(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything kept exact: the compiled exact step, but for sums that are rounded once, to 8 bits."""
    put_back: list[Any] = []

    def choose(gm: torch.fx.GraphModule) -> float:
        for candidate in choosing._candidates(gm.graph, Roofs(copy=4e12, product=7e14))[0]:
            candidate.apply()
        gm.graph.eliminate_dead_code()
        for norm, gradient in list(exact_norms.pairs(gm.graph)):
            put_back.append(gradient.args[9:])
            exact_norms.put_back(gm.graph, norm, gradient)
        gm.graph.eliminate_dead_code()
        gm.recompile()
        return math.inf

    monkeypatch.setattr(compiled, "_choose", choose)
    build = functools.partial(PreNorm, dtype)
    step = MergedStep(converted(build), SimpleNamespace(**vars(DEFINITION), inlines=kernels.inlines))
    assert len(put_back) == 2
    assert all(after is not None for _, after in put_back)
    assert step.results == step.gradients_of_x == []
    assert distance(step.gradients, Step(converted(build, memory=False), None, "").gradients) <= 2.0**-6


class Gated(nn.Module):
    """StarNet's product: its factors are kept for the gradient of each other, and made into what the layer read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Conv2d(16, 64, 1), nn.Conv2d(16, 64, 1), nn.Conv2d(64, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return self.out(F.relu6(self.a(x)) * self.b(x)).float()


def test_codes_that_several_tensors_are_made_of_are_packed_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only without all three the two kernels that pack are gone: their time belongs to the three together."""
    found: list[tuple[float, float, int]] = []
    wanted: list[float] = []

    def choose(gm: torch.fx.GraphModule) -> float:
        roofs = Roofs(copy=4e12, product=7e14)
        kernels_of = (torch.ops.hotrain.keep_codes.default, torch.ops.hotrain.restore_codes.default)
        nodes = [n for target in kernels_of for n in gm.graph.find_nodes(op="call_function", target=target)]
        wanted.append(sum(costs.excess(node, roofs) for node in nodes))
        for candidate in choosing._candidates(gm.graph, roofs)[0]:
            candidate.apply()
            gm.graph.eliminate_dead_code()
            left = [n for target in kernels_of for n in gm.graph.find_nodes(op="call_function", target=target)]
            found.append((candidate.ms, candidate.nbytes, len(left)))
        gm.recompile()
        return math.inf

    monkeypatch.setattr(compiled, "_choose", choose)
    Step(
        converted(Gated),
        kernels,
        aot_autograd(fw_compiler=_as_it_is, bw_compiler=_as_it_is, partition_fn=compiled.partition),
    )
    entries = 2 * 64 * 6 * 5
    (_, of_input, of_others), (_, of_three, left) = found
    assert of_input == 2 * entries / 4 * 3 / 4, "of the layers before: 16 bits, and 4 of them"
    assert of_three == 3 * 2 * entries - 2 * entries / 2, "two factors and their product, and codes of the factors"
    assert (of_others, left) == (3, 0)
    assert sum(ms for ms, *_ in found) == pytest.approx(wanted[0]), "each kernel once, and fused formulas gain nothing"


def _sum_behind(m: Any, x: Tensor) -> Tensor:
    c = torch.tanh(m.conv(x))
    return m.out(torch.tanh(F.relu(m.norm(c) + torch.sigmoid(c)) + c))


def test_a_gradient_that_is_added_behind_is_not_written_over() -> None:
    """The gradient of the outer sum is read by batch norm's gradient twice: by its first pass, which may write the
    gradient of ReLU's argument over it, and as the shortcut's, which it adds to g_x."""
    seen: list[bool] = []

    def look(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            if node.target is torch.ops.hotrain.norm_gradient.default:
                seen.append(node.args[10] is not None)
            assert torch.ops.hotrain.norm_gradient_.default not in node.args
        return make_boxed_func(graph.forward)

    with using(SimpleNamespace(**vars(DEFINITION), inlines=kernels.inlines)):
        model, x = converted(functools.partial(Net, _sum_behind)), image().requires_grad_()
        backend = aot_autograd(fw_compiler=look, bw_compiler=look, partition_fn=compiled.partition)
        torch.compile(model, backend=backend)(x).square().sum().backward()
    assert seen == [True]


def test_a_cast_that_changes_the_layout_stays_behind_a_norm() -> None:
    def call(m: Any, x: Tensor) -> Tensor:
        c = torch.tanh(m.conv(x))
        y = m.norm(c).to(torch.bfloat16, memory_format=torch.contiguous_format)
        return m.out(torch.tanh(y).float() + c)

    build = functools.partial(Net, call)
    other = eager(build)
    step = MergedStep(converted(build), SimpleNamespace(**vars(DEFINITION), inlines=kernels.inlines))
    assert step.results == [None]
    assert distance(step.gradients, other.gradients) <= 2.0**-7


@pytest.mark.parametrize("case", ["frozen", "conv3d"])
def test_a_gradient_whose_layout_no_convolution_asks_for_is_not_copied(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen weight needs no x, of which only the shape is there; volumes have a channels-last of their own."""
    monkeypatch.setattr(compiled, "SMALL", 2)
    kind, layout = (nn.Conv3d, torch.channels_last_3d) if case == "conv3d" else (nn.Conv2d, LAST)
    model = nn.Sequential(*(kind(16, 16, 3, padding=1) for _ in range(3))).to(DEVICE, memory_format=layout)
    model[1].weight.requires_grad_(case != "frozen")
    hotrain.convert(model, "exact", memory="block")
    size = (2, 16, 4, 6, 5) if case == "conv3d" else (2, 16, 6, 5)
    x = draw(*size).contiguous(memory_format=layout).requires_grad_()

    def look(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        assert not graph.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=look, bw_compiler=look, partition_fn=compiled.partition)
    y = torch.compile(model, backend=backend)(x)
    y.backward(torch.randn_like(y))


class Slices(nn.Module):
    """Convolutions of some channels of an image, whose gradients are some channels of another."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.out = nn.Conv2d(16, 64, 1), nn.Conv2d(64, 16, 1)
        self.convs = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.tanh(self.stem(x)).chunk(2, 1)
        return self.out(torch.cat([conv(part) for conv, part in zip(self.convs, parts, strict=True)], 1))


class FromTokens(nn.Module):
    """A convolution of an image that is channels first, as behind windows of tokens, by a weight in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.out = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.stem(torch.tanh(x.flatten(2).contiguous().view(x.shape)))).contiguous())


@pytest.mark.parametrize(("build", "convolutions"), [(Slices, 4), (FromTokens, 2)], ids=["slices", "from tokens"])
def test_gradients_of_convolutions_read_dense_tensors_in_channels_last(
    build: Callable[[], nn.Module], convolutions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's operators would copy slices and tensors in another layout, in each call: 4 ms of MaxViT-T's 39."""
    monkeypatch.setattr(compiled, "SMALL", 2)
    read: list[Tensor] = []

    def look(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        targets = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
        for node in graph.graph.nodes:
            if node.target is targets[1] or (node.target is targets[0] and build is Slices):
                read.extend(t.meta["val"] for t in node.args[: 1 + (node.target is targets[1])])
        return make_boxed_func(graph.forward)

    model = converted(build)
    x = image().requires_grad_()
    backend = aot_autograd(fw_compiler=look, bw_compiler=look, partition_fn=compiled.partition)
    torch.compile(model, backend=backend)(x).square().sum().backward()
    found = [x.grad, *(p.grad for p in model.parameters())]
    assert len(read) >= 2 * convolutions
    assert [t.stride() for t in read if not t.is_contiguous(memory_format=LAST)] == []
    exact, x = converted(build, memory=False), image().requires_grad_()
    exact(x).square().sum().backward()
    assert distance(found, [x.grad, *(p.grad for p in exact.parameters())]) <= NEAR


@pytest.mark.parametrize("name", INTO_THE_SHORTCUT)
def test_what_is_added_to_the_shortcut_is_added_once(name: str) -> None:
    build = functools.partial(Net, INTO_THE_SHORTCUT[name])
    assert_same(Step(converted(build), kernels), eager(build), build)


# Dynamo hands F.hardswish to no mode.
REACHED = ["gelu", "gelu_tanh", "silu"]


@pytest.mark.parametrize("name", REACHED)
def test_a_norm_and_a_function_of_many_slopes(name: str) -> None:
    """Against the same operators with the definition inside, for without them what is kept is another thing, though no
    less of it: of some 2000 slopes two may be a level apart, and of GELU's one in a hundred (`test_buffers`)."""
    build = functools.partial(Net, _behind(ACTIVATIONS[name].f))
    step, other = (Step(converted(build), found, counts=True) for found in (kernels, DEFINITION))
    without = eager(build, counts=True)
    assert step.behind == other.behind == [name]
    assert_same(step, other, build, MOVED[name])
    assert step.bytes <= 1.01 * without.bytes


class Rows(nn.Module):
    """Batch norm of tokens in rows, as LeViT has it, and a function behind; with `flat` they have no other shape."""

    def __init__(self, f: nn.Module, flat: bool) -> None:
        super().__init__()
        self.flat, self.f, self.norm = flat, f, nn.BatchNorm1d(32)
        self.before, self.behind = nn.Linear(16, 32, bias=False), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x.flatten(2).mT)
        normal = self.norm(y.flatten(0, 1))
        return self.behind(self.f(normal if self.flat else normal.reshape_as(y)))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(("f", "name"), [(nn.ReLU(), "relu"), (nn.ReLU(True), "relu"), (nn.Hardswish(), "hardswish")])
def test_a_norm_of_rows_and_what_is_behind_are_one_operator(f: nn.Module, name: str, flat: bool) -> None:
    """Through views; the layer behind reads the same codes, so that no more is kept than in eager mode."""
    build = functools.partial(Rows, f, flat)
    step, other = (Step(converted(build), found, counts=True) for found in (kernels, DEFINITION))
    assert step.behind == other.behind == [name]
    assert_same(step, other, build, MOVED.get(name, SAME))
    assert step.bytes <= 1.01 * eager(build, counts=True).bytes


@pytest.mark.parametrize("options", [{"affine": False}, {"track_running_stats": False}], ids=str)
def test_a_norm_without_parameters_or_running_statistics(options: dict[str, bool]) -> None:
    build = functools.partial(Net, FUSED["+="][0], **options)
    step = Step(converted(build), kernels)
    assert step.behind == ["relu"]
    assert_same(step, eager(build), build)


@pytest.mark.parametrize("channels", [8, 24])
def test_halves_that_are_no_multiple_of_8(channels: int) -> None:
    """With a shortcut and without, from codes that the convolution behind reads (of 8 channels it keeps its input)."""
    build = functools.partial(Net, _block, channels)
    step, other = Step(converted(build), kernels, counts=True), eager(build, counts=True)
    assert step.behind == ["relu", "relu"]
    assert_same(step, other, build)
    assert step.bytes <= 1.01 * other.bytes


@pytest.mark.parametrize(
    ("channels", "layout"),
    [(32, torch.contiguous_format), (20, LAST)],
    ids=["channels-first", "channels that are no multiple of 8"],
)
def test_others_run_as_before(channels: int, layout: torch.memory_format) -> None:
    def build() -> Net:
        # A norm in the middle reads what the convolution before it lays out.
        return Net(lambda m, x: m.out(F.relu(m.norm(m.conv(x).contiguous(memory_format=layout)))), channels)

    step = Step(converted(build), kernels)
    assert not step.behind
    assert_same(step, eager(build), build)


def test_eager_keeps_its_way() -> None:
    """A norm's result is there before the function behind it is called."""
    build = functools.partial(Net, _block)
    with Calls() as calls:
        step = Step(converted(build), kernels, "")
    other = eager(build)
    assert torch.equal(step.y, other.y)
    assert calls.names["keep_codes"]
    assert "normalize" not in calls.names
    assert_same(step, other, build)


def test_autocast() -> None:
    """The convolution's bfloat16 in, the same out; parameters and their gradients are float32."""
    build = functools.partial(Net, FUSED["+="][0])
    with torch.autocast(DEVICE.type, torch.bfloat16):
        step, other = (Step(converted(build), found) for found in (kernels, DEFINITION))
    assert step.behind == ["relu"]
    assert step.y.dtype == torch.bfloat16
    # The definition rounds before and behind the sum: two units of bfloat16, of which the interpreter cuts one off.
    assert distance([step.y.float()], [other.y.float()]) <= 2.0**-7
    assert distance(step.gradients, other.gradients) <= 4 * 2.0**-7


class Around(nn.Module):
    """A block that is checkpointed. Nothing is known of its input, which it would keep by itself in a checkpoint."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks, self.norm = nn.ModuleList([Net(_block)]), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(x * 1.0)) * 1.0
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return F.relu(x)


def test_a_checkpointed_block_has_the_same_gradients() -> None:
    """The block's norms are compressed within, once more in backward, and their statistics move once."""
    behind: list[str] = []

    def run(name: str, reference: Any, *args: Any) -> Any:
        if name == "batch_norm.normalize":
            behind.append(args[6])
        return kernels.run(name, reference, *args)

    counted = SimpleNamespace(**{name: getattr(kernels, name) for name in kernels.__all__})
    counted.run = run

    def step(checkpointed: bool, found: Any) -> Step:
        return Step(converted(lambda: Around(checkpointed)), found, "aot_eager")

    got = step(True, counted)
    assert behind == ["relu"] * (1 + 2 * 2)
    for other in (step(False, kernels), step(True, None)):
        assert_same(got, other, lambda: Around(True))

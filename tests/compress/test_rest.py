"""What no operator supports: codes where the derivative allows them, all else as PyTorch has it."""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from operator_cases import differentiate, nbytes, saving, with_operators
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hotrain
from hotrain import autograd, kernels
from hotrain.compress import eager
from hotrain.compress.formats import GROUPED
from hotrain.compress.interpose import Compressed
from hotrain.compress.report import Buffers

INT8 = GROUPED["int8"]
X = (4, 8, 48)

# Of a group of n normal entries the largest is about 3σ, so that a step of int8 is 3σ/127 and its error, uniform, 0.7 %
# of σ. Twice that is a derivative's share that is quadratic in what is saved; the last half is for luck.
INT8_ERROR = 0.02
# Half a unit of bfloat16's last place is 2⁻⁸ of an entry; rsqrt has its cube.
BFLOAT16_ERROR = 3 * 2**-8


@pytest.fixture(autouse=True)
def _small_tensors_too(small_tensors_too: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "SMALL", 100)


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def inner(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """f of tensors that are no leaves, as between layers."""
    return lambda *inputs: f(*(t + 0 for t in inputs))


def positive(t: Tensor) -> Tensor:
    return t.abs() + 0.1


def int8(*shapes: tuple[int, ...]) -> int:
    return sum(INT8.nbytes((torch.Size(shape[:-1]).numel(), shape[-1])) for shape in shapes)


def short(*shapes: tuple[int, ...]) -> int:
    return sum(2 * torch.Size(shape).numel() for shape in shapes)


N = torch.Size(X).numel()

PLACES, ROWS = torch.arange(N).view(X) * 5 % 8, torch.tensor([2, 0, 1, 0])  # of axis 1; of axis 0, one of them twice

# name → (call, shapes, bytes that are to be kept, error of the gradients)
KEPT: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...], int, float]] = {
    "exp": (torch.exp, (X,), short(X), BFLOAT16_ERROR),
    "exp of a method": (lambda x: x.exp(), (X,), short(X), BFLOAT16_ERROR),
    "exp in place": (lambda x: x.exp_(), (X,), short(X), BFLOAT16_ERROR),
    "expm1": (torch.expm1, (X,), short(X), BFLOAT16_ERROR),
    "square": (torch.square, (X,), int8(X), INT8_ERROR),
    "power of two": (lambda x: x**2, (X,), int8(X), INT8_ERROR),
    "power of three": (lambda x: torch.pow(x, exponent=3), (X,), int8(X), INT8_ERROR),
    "erf": (torch.erf, (X,), int8(X), INT8_ERROR),
    "softplus": (lambda x: F.softplus(x, 2.0), (X,), int8(X), INT8_ERROR),
    "elu": (F.elu, (X,), int8(X), INT8_ERROR),
    "celu": (lambda x: F.celu(x, 0.5), (X,), int8(X), INT8_ERROR),
    "celu in place": (lambda x: F.celu(x, 1.5, inplace=True), (X,), int8(X), INT8_ERROR),
    "glu": (F.glu, (X,), int8(X), INT8_ERROR),
    "logsigmoid": (F.logsigmoid, (X,), int8(X) + 4 * N, INT8_ERROR),  # on a CPU exp(−|x|) too, of no graph
    "div": (lambda a, b: a / b.exp(), (X, X), int8(X) + short(X), INT8_ERROR),  # the divisor is exp's result
    "div by a column": (lambda a, b: a / b, (X, (4, 8, 1)), int8(X) + 4 * 32, INT8_ERROR),
    "addcmul": (torch.addcmul, (X, X, X), int8(X, X), INT8_ERROR),
    # Of both its nodes once; the norms themselves, and what they are clamped to.
    "normalize": (lambda x: F.normalize(x, dim=-1), (X,), short(X) + 2 * 4 * 32, BFLOAT16_ERROR),
    "norm": (lambda x: x.norm(dim=-1), (X,), short(X) + 4 * 32, BFLOAT16_ERROR),
    "vector norm": (lambda x: torch.linalg.vector_norm(x, dim=-1), (X,), short(X) + 4 * 32, BFLOAT16_ERROR),
    "norms of pairs": (lambda x: x.norm(dim=-1), ((32, 24, 2),), short((32, 48)) + 4 * 32 * 24, BFLOAT16_ERROR),
    "einsum": (lambda a, b: torch.einsum("bic,bjc->bij", a, b), (X, X), int8((4, 8, 48), (4, 8, 48)), INT8_ERROR),
    "matrix product": (torch.mm, ((20, 48), (48, 16)), int8((20, 48), (48, 16)), INT8_ERROR),
    "linear": (F.linear, ((20, 48), (16, 48)), int8((20, 48)) + 4 * 16 * 48, INT8_ERROR),
    "conv1d": (F.conv1d, ((4, 8, 48), (3, 8, 5)), int8((4, 8, 48)) + 4 * 3 * 8 * 5, INT8_ERROR),
    "in-place product": (operator.imul, (X, X), int8(X, X), INT8_ERROR),
    "abs": (torch.abs, (X,), N, 0.0),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 3), ((2, 3, 8, 8),), 0, 0.0),
    "interpolate": (lambda x: F.interpolate(x, size=5, mode="area"), ((2, 3, 8, 8),), 0, 0.0),
    # The indices, and nothing of x.
    "gather": (lambda x: x.gather(1, PLACES), (X,), 8 * N, 0.0),
    "take_along_dim": (lambda x: torch.take_along_dim(x, PLACES, dim=1), (X,), 8 * N, 0.0),
    "index_add": (lambda x: torch.zeros(3, 8, 48).index_add(0, ROWS, x), (X,), 8 * 4, 0.0),
    "index_add in place": (lambda x: torch.zeros(3, 8, 48).index_add_(0, ROWS, x, alpha=2), (X,), 8 * 4, 0.0),
    "index_copy": (lambda x: torch.zeros(4, 8, 48).index_copy(0, ROWS.argsort(), x), (X,), 8 * 4, 0.0),
    "sqrt": (lambda x: positive(x).sqrt(), (X,), N + short(X), BFLOAT16_ERROR),
    "rsqrt": (lambda x: positive(x).rsqrt(), (X,), N + short(X), BFLOAT16_ERROR),
    "log": (lambda x: positive(x).log(), (X,), N + short(X), BFLOAT16_ERROR),
    "a root by its power": (lambda x: positive(x) ** 0.5, (X,), N + short(X), BFLOAT16_ERROR),
    "reciprocal": (lambda x: 1 / positive(x), (X,), N + short(X), BFLOAT16_ERROR),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_and_what_comes_of_it(name: str) -> None:
    """Results to the bit; gradients near; the bytes are the formats'."""
    call, shapes, size, error = KEPT[name]
    inputs = [rand(*shape) for shape in shapes]
    if name in ("linear", "conv1d", "div by a column"):
        call = (lambda f: lambda x, w: f(x + 0, w))(call)  # the other one is a parameter
    else:
        call = inner(call)
    with saving() as held:
        with_operators(call, *inputs)
    assert nbytes(held) == size
    got, want = differentiate(lambda *t: with_operators(call, *t), inputs), differentiate(call, inputs)
    assert torch.equal(got[0], want[0])
    for g, w in zip(got[1:], want[1:], strict=True):
        assert (g - w).norm() <= error * w.norm()
    assert got[1].stride() == want[1].stride()


@pytest.mark.parametrize("name", ["square", "einsum", "matrix product", "sqrt"])
def test_the_rounding_is_there(name: str) -> None:
    """Else the test above would say nothing."""
    call, shapes, _, _ = KEPT[name]
    inputs = [rand(*shape) for shape in shapes]
    got, want = (differentiate(f, inputs) for f in (lambda *t: with_operators(inner(call), *t), inner(call)))
    assert not torch.equal(got[1], want[1])


POLES: dict[str, Callable[[Tensor], Tensor]] = {
    "div": lambda x: torch.ones(16, 32).requires_grad_() / x,
    "div in place": lambda x: torch.ones(16, 32).requires_grad_().clone().div_(x),
    "div in place by keyword": lambda x: torch.ones(16, 32).requires_grad_().clone().div_(other=x),
    "div by keywords": lambda x: torch.div(input=torch.ones(16, 32).requires_grad_(), other=x),
    "by itself": lambda x: x / x,
    "reciprocal": lambda x: 1 / x,
    "addcdiv": lambda x: torch.addcdiv(torch.zeros(16, 32), torch.ones(16, 32), x),
    "log": torch.log,
    "sqrt": torch.sqrt,
    "norm": lambda x: x[..., None].norm(dim=-1),
    "rsqrt": torch.rsqrt,
    "a negative power": lambda x: x**-2,
    "a power of a tensor": lambda x: x ** torch.full((16, 32), -1.0),
}


@pytest.mark.parametrize("name", POLES)
def test_small_entries_beside_large_ones_stay_what_they_are_under_a_pole(name: str) -> None:
    """From 1e-6 to 1e3 in one group: each gradient is right in proportion to itself. int8 would divide by zero."""
    x = (10 ** torch.linspace(-6, 3, 32)).repeat(16, 1).requires_grad_()
    call = POLES[name]
    (got,) = torch.autograd.grad(with_operators(lambda t: call(t + 0), x).sum(), x)
    (want,) = torch.autograd.grad(call(x + 0).sum(), x)
    # Of up to three factors each of 2⁻⁸, and of the difference of two quotients that cancel in x / x.
    scale = 1 / x.detach() if name == "by itself" else want.abs()
    assert ((got - want).abs() <= 4 * 2**-8 * scale).all()


EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "cross_entropy": lambda x: F.cross_entropy(x.flatten(0, 1), torch.arange(32)),
    "mse_loss": lambda x: F.mse_loss(x, x.detach() * 1.01),
    "sin": torch.sin,
    "var": lambda x: x.var(-1),
    "amax": lambda x: x.amax(-1),
    "cumprod": lambda x: x.cumprod(-1),
    "clamp": lambda x: x.clamp(-1, 1),
    "maximum": lambda x: torch.maximum(x, x.detach() * 2),
    "selu": F.selu,
    "prelu": lambda x: F.prelu(x, torch.full((1,), 0.25)),
    "elu with a step": lambda x: F.elu(x, 2.0),
    "another norm": lambda x: F.normalize(x, p=1.0),
    "a power of a tensor": lambda x: (x.detach().abs() + 1) ** x,
    "a high power": lambda x: x**9,
    "grid_sample": lambda x: F.grid_sample(x[None], x[None, ..., :2], align_corners=False),
    "inverse": lambda x: torch.linalg.inv(x[..., :8] + 5 * torch.eye(8)),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_has_no_rule_is_exact_and_said_to_be_full(name: str) -> None:
    x, call = rand(*X), inner(EXACT[name])
    buffers = Buffers()

    def run(x: Tensor) -> Tensor:
        with Compressed(buffers):
            return call(x)

    got, again, want = differentiate(run, [x]), differentiate(run, [x]), differentiate(call, [x])
    assert all(torch.equal(g, w) and torch.equal(a, w) for g, a, w in zip(got, again, want, strict=True))
    assert buffers.full
    assert not any("(saved)" in what for what in buffers.formats)


def test_the_report_says_which_functions_keep_codes_and_how_much_others_keep() -> None:
    buffers = Buffers()
    x = torch.randn(64, 64, 128, requires_grad=True)
    with Compressed(buffers):
        y = F.glu(x + 0)
        y = y / torch.sin(y)
    assert buffers.formats == {"glu (saved)": "int8", "div (saved)": "bfloat16, int8"}
    assert buffers.full == {"sin": "1.0 MiB per call, no rounding rule for it"}  # 64 · 64 · 64 · 4 bytes
    assert eager.rule_of(buffers.looked_at, torch.sin, (x,), {}) is None  # known now


def test_parameters_and_inputs_and_what_is_made_of_them_alone_stay() -> None:
    """Views, transposed and cast copies too: a copy of a weight does not grow with the batch."""
    x, w = rand(*X), nn.Parameter(torch.randn(48, 48))
    with saving() as held:
        with_operators(lambda: torch.einsum("bij,kj->bik", x + 0, w.T))
        with_operators(lambda: torch.mm((x + 0).flatten(0, 1).bfloat16(), w.bfloat16()))
        with_operators(lambda: (x * 1).mul_(x))
    mine = [t for t in held if t.dtype != torch.uint8 and t.shape[-1] != 1]
    assert nbytes(mine, [x, w]) == 2 * w.numel()
    assert sum(t.numel() for t in held if t.dtype == torch.uint8) == 3 * N
    with saving() as held:
        with_operators(torch.exp, torch.randn(*X))
        with_operators(torch.square, x)
        with_operators(torch.square, x.view(-1, 48).T)
    assert nbytes(held, [x]) == 0


def test_autocast_s_copies_of_activations_are_kept_as_codes_and_those_of_weights_are_not() -> None:
    x, w = rand(*X), nn.Parameter(torch.randn(3, 8, 5))
    with saving() as held, torch.autocast("cpu", torch.bfloat16):
        with_operators(lambda: F.conv1d(x + 0, w))
    assert nbytes(held) == int8(X) + 2 * w.numel()


def test_double_precision_small_tensors_and_subclasses_stay() -> None:
    class Own(Tensor):
        pass

    for x in (torch.randn(X, dtype=torch.float64), torch.randn(9, 11), torch.randn(X).as_subclass(Own)):
        leaf = x.requires_grad_()
        got, want = (
            differentiate(f, [leaf]) for f in (lambda t: with_operators(inner(torch.square), t), inner(torch.square))
        )
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_an_expanded_tensor_is_not_made_larger() -> None:
    x = rand(8, 1)
    with saving() as held:
        with_operators(lambda: torch.square((x * 1).expand(8, 100)))
    assert nbytes(held) == 4 * 8


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "channels last": lambda x: x.permute(0, 3, 1, 2),
    "an axis of one": lambda x: x[:, :1].contiguous().transpose(1, 3),
    "every other": lambda x: x[..., ::2],
    "a part": lambda x: x.chunk(2, -1)[1],
    "few columns": lambda x: x[..., :7].contiguous(),
    "a flat one": lambda x: x.flatten(),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_come_back(name: str) -> None:
    """Values within half a step (and the scale's 2⁻⁸) of a group's largest; strides of what is dense."""
    torch.manual_seed(2)
    x = LAYOUTS[name](rand(4, 6, 5, 48) + 0)
    back = with_operators(torch.square, x).grad_fn._saved_self
    assert back.shape == x.shape
    assert 0 < (back - x).abs().max() <= x.abs().max() / 254 * (1 + 2**-7)
    if name not in ("every other", "a part"):
        assert [s for s, n in zip(back.stride(), x.shape, strict=True) if n > 1] == [
            s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1
        ]


CUT: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {  # and how wide its input is
    "softplus, flat further out": (lambda x: F.softplus(x, 0.02), 300),
    "softplus of another sign": (lambda x: F.softplus(x, beta=-2), 3),
    "celu, flat further out": (lambda x: F.celu(x, alpha=50), 100),
    "celu, flat nowhere": (lambda x: F.celu(x, -2), 3),
    "celu, flat above all of its dtype": (lambda x: F.celu(x.half(), 1e4).float(), 3),
    "glu along another axis": (lambda x: F.glu(x, 1), 50),
}


@pytest.mark.parametrize("name", CUT)
def test_an_input_is_cut_off_only_where_its_function_is_flat(name: str) -> None:
    """Which its arguments say."""
    call, width = CUT[name]
    x = (width * torch.randn(X)).requires_grad_()
    got, want = (torch.autograd.grad(f(x).sum(), x)[0] for f in (lambda x: with_operators(inner(call), x), inner(call)))
    assert (got - want).norm() <= 2 * INT8_ERROR * want.norm()


def test_what_is_cut_off_for_one_use_is_whole_for_another() -> None:
    """The first packs its input for both, else."""
    x = (20 * torch.randn(X)).requires_grad_()

    def run(x: Tensor) -> Tensor:
        z = x + 0
        return torch.erf(z) + z.square()

    got, want = (torch.autograd.grad(f(x).sum(), x)[0] for f in (lambda x: with_operators(run, x), run))
    assert (got - want).norm() <= INT8_ERROR * want.norm()


def test_nan_and_infinity_are_not_hidden() -> None:
    for bad in (float("nan"), float("inf")):
        x = torch.randn(X)
        x[1, 2, 3] = bad
        (g,) = torch.autograd.grad(with_operators(inner(torch.square), x.requires_grad_()).sum(), x)
        assert not g[1, 2, 3].isfinite()
        assert g[0].isfinite().all()


# ---- once ----


def test_a_tensor_that_two_nodes_save_is_kept_once() -> None:
    x = rand(*X)
    with saving() as held:

        def run() -> Tensor:
            weights = (x + 0).exp()  # saves its result, in bfloat16
            return weights / weights.sum(-1, keepdim=True)  # and this the same, for which int8 would do

        with_operators(run)
    assert nbytes(held) == short(X) + 4 * 32


def test_what_is_kept_for_one_use_does_for_another_only_where_it_says_enough() -> None:
    """Signs are no values, int8 no divisor; whichever comes first."""
    uses: list[Callable[[Tensor], Tensor]] = [torch.abs, torch.square, torch.exp_, lambda t: 1 / (t.detach() + 9) / t]
    for first in uses:
        for second in uses:
            x = (10 ** torch.linspace(-3, 1, 48)).repeat(32, 1).requires_grad_()

            def call(x: Tensor, first: Any = first, second: Any = second) -> Tensor:
                return first(x.clone() if first is torch.exp_ else x) + second(x.clone() if second is torch.exp_ else x)

            (got,) = torch.autograd.grad(with_operators(inner(call), x).sum(), x)
            (want,) = torch.autograd.grad(inner(call)(x).sum(), x)
            # Of the largest of a group: half a step of int8 for each square, and 2·2⁻⁸ of a quotient's own.
            assert ((got - want).abs() <= 2 * 2 * 10 / 250 + 3 * 2**-8 * want.abs()).all()


def test_codes_are_never_those_of_another_tensor() -> None:
    """Memory is used again, objects are made where others were, tensors change: codes are taken anew each time."""

    def slope(x: Tensor) -> Tensor:
        return torch.autograd.grad(torch.square(x).sum(), x)[0]

    leaf = rand(*X)
    with Compressed(Buffers()):
        for scale in range(1, 40):
            x = leaf * scale
            assert torch.allclose(slope(x), 2 * x, atol=float(x.detach().abs().max()) / 100)
            del x
        x = leaf + 0
        kept = torch.square(x)
        x.data = torch.full(X, 3.0)
        assert torch.allclose(slope(x), torch.full(X, 6.0), rtol=0.01)
        del kept
        x = leaf + 0
        kept = torch.square(x)
        x.mul_(50)
        assert torch.allclose(slope(x), 2 * x, atol=float(x.detach().abs().max()) / 100)
        del kept


def test_nothing_but_codes_lives_until_backward() -> None:
    """The hooks are held by the graph: they must not hold what they were called with."""
    leaf = rand(*X)
    with Compressed(Buffers()):
        x, other = leaf + 0, leaf.exp()
        y = torch.einsum("bij,bij->b", x, other)
        storage, ref = StorageWeakRef(x.untyped_storage()), weakref.ref(x)
        del x, other
    gc.collect()
    assert ref() is None
    assert storage.expired()
    y.sum().backward()
    assert leaf.grad is not None


# ---- changed after it was kept ----

CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "the tensor": lambda x: x.add_(1),
    "a view of it": lambda x: x[0].zero_(),
    "a detached one": lambda x: x.detach().mul_(2),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("call", [torch.square, torch.sin, lambda x: x / x.exp()], ids=["codes", "exact", "both"])
def test_what_is_modified_in_place_after_it_was_kept_raises(call: Callable[[Tensor], Tensor], change: str) -> None:
    leaf = rand(*X)
    for compressed in (False, True):
        x = leaf + 0
        y = with_operators(call, x) if compressed else call(x)
        CHANGES[change](x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_change_is_seen_when_the_tensor_itself_is_gone() -> None:
    x = rand(*X) + 0
    view = x.detach()
    y = with_operators(torch.square, x)
    del x
    view.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- with others ----


class Softsign(nn.Module):
    """A block of functions that no operator supports, and one of a custom autograd function's."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        h = h / (1 + h.abs())
        weights = torch.einsum("bic,bjc->bij", h, h).exp()
        return x + self.fc2(F.softplus(torch.einsum("bij,bjc->bic", weights / weights.sum(-1, keepdim=True), h)))


class Net(nn.Module):
    def __init__(self, how: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.how = nn.ModuleList(Softsign() for _ in range(2)), how

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.how is None else self.how(block, x)
        return x


def batch() -> Tensor:
    return torch.randn(2, 33, 48, generator=torch.Generator().manual_seed(3))


def gradients(model: nn.Module) -> list[Tensor]:
    hotrain.manual_seed(1)
    model.zero_grad()
    (model(batch()) * torch.randn(48, generator=torch.Generator().manual_seed(5))).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def converted(net: nn.Module, method: str = "exact") -> tuple[nn.Module, Any]:
    report = hotrain.convert(net, method, memory="block")
    return net, report.buffers


def test_a_model_of_functions_that_no_operator_supports() -> None:
    """Bytes fall to less than half of what they were, gradients agree as far as int8 and int4 inputs of layers go."""
    exact, (net, buffers) = Net(), converted(Net())
    before, after = hotrain.saved_bytes(exact, batch()), hotrain.saved_bytes(net, batch())
    assert after.total < 0.5 * before.total
    for got, want in zip(gradients(net), gradients(exact), strict=True):
        assert (got - want).norm() <= 0.15 * want.norm()  # layers' inputs have 15 levels: 3σ/7/√12 is 0.12 σ
    assert {f"{name} (saved)" for name in ("div", "abs", "einsum", "exp", "softplus")} <= set(buffers.formats)


def test_saved_bytes_counts_the_codes() -> None:
    class Squared(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square()

    net, _ = converted(Squared(48, 64))
    audit = hotrain.saved_bytes(net, batch())
    assert audit.by_operator["pow"] == INT8.nbytes((2, 33, 64))


def test_hooks_of_others_get_the_codes() -> None:
    x = rand(*X)
    want = torch.autograd.grad(with_operators(inner(torch.square), x).sum(), x)[0]
    with torch.autograd.graph.save_on_cpu():
        y = with_operators(inner(torch.square), x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], want)


def test_a_custom_function_keeps_what_it_keeps() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return 3 * g * x**2

    x = rand(*X)
    call = inner(Cube.apply)
    got, want = (differentiate(f, [x]) for f in (lambda t: with_operators(call, t), call))
    assert torch.equal(got[1], want[1])


CHECKPOINTS: dict[str, Callable[..., Tensor]] = {
    "reentrant": lambda block, x: checkpoint(block, x.requires_grad_() if x.is_leaf else x, use_reentrant=True),
    "non-reentrant": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "non-reentrant, of a function": lambda block, x: checkpoint(type(block).forward, block, x, use_reentrant=False),
    "two, nested": lambda block, x: checkpoint(
        lambda x: checkpoint(block, x, use_reentrant=False), x, use_reentrant=False
    ),
}


@pytest.mark.parametrize("how", CHECKPOINTS)
@pytest.mark.parametrize("method", ["exact", "hot-unbiased"])
def test_a_checkpoint_keeps_its_input_alone_and_its_gradients_are_right(how: str, method: str) -> None:
    net, _ = converted(Net(CHECKPOINTS[how]), method)
    got, want = gradients(net), gradients(converted(Net(), method)[0])
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        # What is int8 in one is exact in the other; a slightly other g_y takes other steps of the method's four bits.
        assert (g - w).norm() <= (0.05 if method == "exact" else 0.15) * w.norm()
    with saving() as held:
        net(batch())
    assert how == "reentrant" or not any(t.dtype == torch.uint8 for t in held)


def test_a_checkpoint_around_the_model() -> None:
    net, _ = converted(Net())
    want = gradients(net)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.net, x, use_reentrant=False)

    for got, w in zip(gradients(Around()), want, strict=True):
        assert (got - w).norm() <= 0.05 * w.norm()  # inside it nothing is packed


@pytest.mark.parametrize("call", [torch.square, torch.exp, lambda x: x / x.exp()], ids=["square", "exp", "div"])
def test_double_backward_is_right(call: Callable[[Tensor], Tensor]) -> None:
    """The second derivative is that of the same codes, within their error."""
    x = rand(*X)

    def second(f: Callable[[Tensor], Tensor]) -> Tensor:
        (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), x)[0]

    got, want = second(lambda t: with_operators(inner(call), t)), second(inner(call))
    assert (got - want).norm() <= 3 * INT8_ERROR * want.norm()  # three factors that are rounded


def test_torch_func_inside_of_a_forward_is_left_alone() -> None:
    x = rand(*X)

    def call(x: Tensor) -> Tensor:
        g = torch.func.grad(lambda t: torch.square(t).exp().sum())(x + 0)
        return g + torch.func.vmap(torch.exp)(x + 0) + torch.func.jvp(torch.exp, (x + 0,), (x + 0,))[1]

    got, want = (differentiate(f, [x]) for f in (lambda t: with_operators(call, t), call))
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_where_hooks_are_forbidden_nothing_is_packed() -> None:
    x = rand(*X)
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        got = with_operators(inner(torch.square), x)
    assert torch.equal(torch.autograd.grad(got.sum(), x)[0], 2 * x)


def test_no_grad_and_eval_are_untouched() -> None:
    net, buffers = converted(Net())
    with torch.no_grad():
        net(batch())
    assert buffers.formats == {}
    with saving() as held:
        net.eval()(batch())
    assert buffers.formats == {}
    assert not any(t.dtype == torch.uint8 for t in held)


def test_blocks_inside_of_a_model_pack_once() -> None:
    """A function called in a block passes through the block's mode and the model's."""
    net, _ = converted(Net())
    with saving() as held:
        net.blocks[0](batch())
    one = nbytes(held, [*net.parameters()])
    with saving() as held:
        net(batch())
    # twice, but for the first block's input, which is nobody's result there
    assert nbytes(held, [*net.parameters()]) <= 2 * one + INT8.nbytes((2, 33, 48))


def test_hotrain_s_own_operators_are_not_looked_at() -> None:
    """A mode outside of another one sees them called."""
    buffers, x = Buffers(), rand(*X)
    with Compressed(buffers), Compressed(buffers):
        F.layer_norm(x, (48,))
    assert buffers.formats
    assert "norm" not in buffers.looked_at


def test_a_compiled_model_has_no_hooks() -> None:
    net, buffers = converted(Net())
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    want = gradients(Net())
    for got, w in zip(gradients(compiled), want, strict=True):
        assert (got - w).norm() <= 0.15 * w.norm()
    assert not any("(saved)" in what for what in buffers.formats)


def test_on_a_gpu_codes_are_packed_and_unpacked_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formulas are twenty passes over a tensor in eager mode; the launches are counted, their references run."""
    launched: list[str] = []

    class Kernels:
        def buffers_reason(self, device: torch.device, dtype: torch.dtype) -> None:
            pass

        def run(self, name: str, reference: Callable[[], Any], *args: Any) -> Any:
            launched.append(name)
            return reference()

        def __getattr__(self, name: str) -> Any:
            return getattr(kernels, name)

    monkeypatch.setitem(autograd.KERNELS, "cpu", Kernels())
    x = rand(*X)
    with Compressed(Buffers()):
        y = torch.erf(x + 0)
    y.sum().backward()
    assert launched == ["codes.pack", "codes.unpack"], launched


class _Marked(Tensor):
    """A tensor of a class of its own."""


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "f",
    [
        lambda t: F.layer_norm(t, (64,)),
        F.gelu,
        F.relu,
        lambda t: F.softmax(t, -1),
        lambda t: F.dropout(t, 0.5),
        lambda t: F.scaled_dot_product_attention(*[t.unflatten(-1, [2, 32]).transpose(1, 2)] * 3).transpose(1, 2),
        torch.mul,
    ],
    ids=["layer_norm", "gelu", "relu", "softmax", "dropout", "attention", "product"],
)
def test_nested_tensors_are_left_to_pytorch(f: Callable[..., Tensor]) -> None:
    """Of rows of several lengths: forward to the bit, and the exact gradient (mul's operands are codes of values)."""
    offsets = torch.tensor([0, 40, 300])

    def run(x: Tensor) -> Tensor:
        nested = torch.nested.nested_tensor_from_jagged(x * 1.5, offsets=offsets)
        return (f(nested, nested) if f is torch.mul else f(nested)).values()

    x = rand(300, 64)
    torch.manual_seed(0)
    got = differentiate(lambda x: with_operators(run, x), [x])
    torch.manual_seed(0)
    want = differentiate(run, [x])
    assert torch.equal(got[0], want[0])
    assert (got[1] - want[1]).norm() <= INT8_ERROR * want[1].norm()


def test_dropout_of_a_tensor_of_another_class_draws_as_pytorch() -> None:
    """Its mask, and what the next draw is."""
    drawn = []
    for run in (lambda call, *t: call(*t), with_operators):
        torch.manual_seed(0)
        x = rand(8, 64, 64)
        y = run(lambda x: F.dropout((x * 1.0).as_subclass(_Marked), 0.5), x)
        drawn.append((y.detach().as_subclass(Tensor), torch.rand(3)))
    for one, other in zip(*drawn, strict=True):
        assert torch.equal(one, other)

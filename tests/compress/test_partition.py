"""What no operator supports, compiled: what crosses from forward to backward is codes where its use allows it."""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.compilers import nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hotrain
import hotrain.compiling
from hotrain.compress import compiled, eager, graph, rules
from hotrain.compress.interpose import Compressed, wrap
from hotrain.compress.report import EAGER, UNCUT, Buffers
from hotrain.private import STRIDES

X = (4, 8, 48)
# As in `test_rest`: int8 is 0.7 % of a normal entry, a derivative's share up to twice that, the rest for luck; bfloat16
# is 2⁻⁸ of each entry, and rsqrt has its cube.
INT8_ERROR = 0.02
BFLOAT16_ERROR = 3 * 2**-8


def _backend(cut: Callable[..., Any]) -> Any:
    """As Inductor cuts and decomposes, without a C++ compiler behind."""
    return aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=cut, decompositions=select_decomp_table())


BACKEND, PLAIN = _backend(compiled.partition), _backend(min_cut_rematerialization_partition)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "SMALL", 100)
    yield
    torch._inductor.config.custom_partitioner_fn = None


class Calls(nn.Module):
    """f of tensors that a matrix product makes: the compiler keeps them, and does not make them again. The result is
    summed up with weights inside of the graph, so that it is not itself kept for its caller."""

    def __init__(self, f: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.f = f
        self.eyes = [torch.eye(shape[-1]) for shape in shapes]

    def forward(self, *inputs: Tensor) -> Tensor:
        made = [(t.flatten(0, -2) @ eye).view(t.shape) for t, eye in zip(inputs, self.eyes, strict=True)]
        y = self.f(*made)
        return (y * torch.linspace(0.5, 1.5, y.numel(), device=y.device).view(y.shape)).sum()


def calling(f: Callable[..., Tensor], *shapes: tuple[int, ...]) -> tuple[Calls, Buffers]:
    model = Calls(f, *shapes).train()
    buffers = wrap(model)
    buffers.full["matmul"] = ""  # said of `Calls` itself
    return model, buffers


def gradients(run: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    y = run(*inputs)
    return y.detach(), list(torch.autograd.grad(y, inputs))


def rand(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def kept_bytes(run: Callable[..., Tensor], inputs: list[Tensor]) -> int:
    """Of what the compiled function gives to its backward, but for its arguments, which others hold."""
    found: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = run(*inputs)
    eyes = getattr(getattr(run, "_orig_mod", None), "eyes", [])
    arguments = {t.untyped_storage().data_ptr() for t in (*inputs, *eyes)}
    size = sum(n for where, n in found.items() if where not in arguments)
    del y
    return size


def positive(t: Tensor) -> Tensor:
    return t.abs() + 0.1


def saved(buffers: Buffers) -> set[str]:
    """The forms in which something was kept."""
    return {form for what, form in buffers.formats.items() if what.endswith(" (saved)")}


# name → (call, how many tensors, forms that are to be found, error of the gradients)
KEPT: dict[str, tuple[Callable[..., Tensor], int, set[str], float]] = {
    "square": (torch.square, 1, {"int8"}, INT8_ERROR),
    "power of three": (lambda x: x**3, 1, {"int8"}, INT8_ERROR),
    "product": (lambda a, b: a * b, 2, {"int8"}, INT8_ERROR),
    "product in place": (lambda a, b: a.clone().mul_(b), 2, {"int8"}, INT8_ERROR),
    "addcmul": (torch.addcmul, 3, {"int8"}, INT8_ERROR),
    "einsum": (lambda a, b: torch.einsum("bic,bjc->bij", a, b), 2, {"int8"}, INT8_ERROR),
    "matrix product": (lambda a, b: a @ b.mT, 2, {"int8"}, INT8_ERROR),
    "conv1d": (lambda x, w: F.conv1d(x, w[:, :, :5]), 2, {"int8"}, INT8_ERROR),
    "gelu by hand": (lambda x: x * 0.5 * (1 + torch.erf(x * 2**-0.5)), 1, {"int8"}, INT8_ERROR),
    "silu by hand": (lambda x: x * torch.sigmoid(x), 1, {"int8"}, INT8_ERROR),
    "softplus": (F.softplus, 1, {"int8"}, INT8_ERROR),
    "glu": (F.glu, 1, {"int8"}, INT8_ERROR),
    "mish": (F.mish, 1, {"int8"}, INT8_ERROR),
    # Slopes with a step at ±3, where one of 200 normal entries is within the rounding of int8: √(1/200)/2 of half of
    # them.
    "hardswish": (F.hardswish, 1, {"int8"}, 2 * INT8_ERROR),
    "difference squared": (lambda a, b: (a - b) ** 2, 2, {"int8"}, INT8_ERROR),
    "sqrt": (lambda x: positive(x).sqrt(), 1, {"bfloat16"}, BFLOAT16_ERROR),
    "rsqrt": (lambda x: positive(x).rsqrt(), 1, {"bfloat16"}, BFLOAT16_ERROR),
    "log": (lambda x: positive(x).log(), 1, {"bfloat16"}, BFLOAT16_ERROR),
    "reciprocal": (lambda x: 1 / positive(x), 1, {"bfloat16"}, BFLOAT16_ERROR),
    "a root by its power": (lambda x: positive(x) ** 2.5, 1, {"bfloat16"}, BFLOAT16_ERROR),
    "normalize": (lambda x: F.normalize(x, dim=-1), 1, {"bfloat16"}, BFLOAT16_ERROR),
    "norm": (lambda x: x.norm(dim=-1), 1, {"bfloat16"}, BFLOAT16_ERROR),
    "divided by one of its own": (lambda x: x / (1 + x.square()), 1, {"bfloat16"}, BFLOAT16_ERROR),
    # Where no rounding of the tensor itself will do, what backward makes from it is made in forward, and rounded there.
    "exp": (torch.exp, 1, {"its derivative in bfloat16"}, BFLOAT16_ERROR),
    "a phase": (torch.sin, 1, {"its derivative in int8"}, INT8_ERROR),
    "a phase squared": (lambda x: x.square().cos(), 1, {"its derivative in int8"}, INT8_ERROR),
    "elu": (lambda x: F.elu(x, 0.3), 1, {"its derivative in 1 bit per element, bfloat16"}, BFLOAT16_ERROR),
    "a comparison": (
        lambda x: torch.where(x.square() > 1, x.square(), x),
        1,
        {"its derivative in 1 bit per element, int8"},
        INT8_ERROR,
    ),
    "a difference": (lambda x: x * (x - x.mean(-1, keepdim=True)), 1, {"its derivative in int8"}, INT8_ERROR),
    "log-sum-exp": (lambda x: x.logsumexp(-1), 1, {"its derivative in bfloat16"}, BFLOAT16_ERROR),
    "abs": (torch.abs, 1, {"sign"}, 1e-6),
    "abs of a multiple, turned": (lambda x: (x * -3).mT.abs(), 1, {"sign"}, 1e-6),
    # Signs that are not the kept tensor's own: they are made in forward, of the tensor itself.
    "abs of a sum": (lambda x: (x + 0.5).abs(), 1, {"its derivative in sign"}, 1e-6),
    "abs of a difference": (lambda x: (x.sigmoid() - 0.5).abs(), 1, {"its derivative in int8, sign"}, INT8_ERROR),
    "pooled by area": (lambda x: F.adaptive_avg_pool2d(x.view(2, 3, 16, 16), 5), 1, {"shape"}, 1e-6),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_and_what_comes_of_it(name: str) -> None:
    """Results as without; gradients near, and off by a rounding where there is one; the forms are those that the use
    allows, and fewer bytes are kept."""
    f, count, forms, error = KEPT[name]
    (model, buffers), inputs = calling(f, *[X] * count), [rand(*X) for _ in range(count)]
    run, plain = torch.compile(model, backend=BACKEND, fullgraph=True), torch.compile(model, backend=PLAIN)
    (y, got), (y_exact, want) = gradients(run, inputs), gradients(Calls(f, *[X] * count), inputs)
    torch.testing.assert_close(y, y_exact, rtol=1e-5, atol=1e-5)
    for g, w in zip(got, want, strict=True):
        assert (g - w).norm() <= error * w.norm()
        assert g.stride() == w.stride()
    assert ((got[-1] - want[-1]).norm() > 1e-4 * want[-1].norm()) == (error >= BFLOAT16_ERROR)
    assert saved(buffers) == forms
    assert buffers.full.keys() == {"matmul"}
    kept = kept_bytes(run, inputs)
    torch._dynamo.reset()
    assert kept < 0.7 * kept_bytes(plain, inputs)


def test_signs_behind_a_product_are_those_of_its_result() -> None:
    """Read off a rounded result, many would be others: the bias of the norm has a gradient of signs alone."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.n = nn.Linear(6, 48), nn.LayerNorm(48)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.n(self.a(x)).roll(3, -1).abs()
            return y

    torch.manual_seed(0)
    model, x, g = Net(), torch.randn(2, 36, 6), torch.randn(2, 36, 48)
    exact = copy.deepcopy(model)
    hotrain.convert(model, "exact", memory="block")
    with _operators_for(100):
        torch.compile(model, backend=BACKEND)(x).backward(g)
    exact(x).backward(g)
    assert model.n.bias.grad is not None
    assert exact.n.bias.grad is not None
    torch.testing.assert_close(model.n.bias.grad, exact.n.bias.grad, rtol=1e-5, atol=1e-4)


# name → (call, the function that the report is to name)
FULL: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "the logits": (lambda x: F.log_softmax(x.view(32, 48), -1), "log_softmax"),
    "of as many digits as the tensor": (lambda x: x.exp() * x.sin() * x.cos(), "cos"),
}


@pytest.mark.parametrize("name", FULL)
def test_what_stays_in_full_and_is_told(name: str) -> None:
    """Gradients are the exact ones, and the report has the function with its bytes."""
    f, told = FULL[name]
    (model, buffers), inputs = calling(f, X), [rand(*X)]
    (_, got), (_, want) = gradients(torch.compile(model, backend=BACKEND), inputs), gradients(Calls(f, X), inputs)
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-5)
    assert not saved(buffers)
    (row,) = buffers.full.keys() - {"matmul"}
    assert told in row.split(", ")
    assert "MiB, compiled: " in buffers.full[row]


# Of small entries beside large ones, a derivative that int8 with a scale for 48 of them would lose.
POLES: dict[str, Callable[[Tensor], Tensor]] = {
    "reciprocal": torch.reciprocal,
    "log": torch.log,
    "root": torch.sqrt,
    "a number by it": lambda x: 2.0 / x,
    "exp": lambda x: x.log().exp().clone(),  # its result is as x is
    "cumprod": lambda x: (x.log() / 9).exp().cumprod(-1),
    "norms of pairs": lambda x: F.normalize(x.view(4, 8, 24, 2), dim=-1),
    "norms of columns": lambda x: F.normalize(x, dim=1),
}


@pytest.mark.parametrize("name", POLES)
def test_small_entries_beside_large_ones(name: str) -> None:
    """Each entry's own derivative is as precise as bfloat16 makes it; three operations with it at most."""
    f, x = POLES[name], torch.logspace(-4, 4, 4 * 8 * 48)[torch.randperm(4 * 8 * 48)].view(X).requires_grad_()
    (_, got), (_, want) = gradients(torch.compile(calling(f, X)[0], backend=BACKEND), [x]), gradients(Calls(f, X), [x])
    if "norms" in name:  # of which the derivative is a difference of two terms: in proportion to the larger
        norm = x.detach().view(4, 8, 24, 2).norm(dim=-1, keepdim=True) if "pairs" in name else x.detach().norm(dim=1)
        norm = norm.expand(4, 8, 24, 2).reshape(X) if "pairs" in name else norm[:, None].expand(X)
        assert ((got[0] - want[0]) * norm).abs().max() <= 6 * 2**-8
    else:
        torch.testing.assert_close(got[0], want[0], rtol=4 * 2**-8, atol=0)


def test_a_condition_or_a_product_is_as_wide_as_what_it_is_made_of() -> None:
    """The derivative of an angle is other · 1 / (x² + other²), chosen where that is not 0 / 0: over four decades here.

    bfloat16 of it and int8 of the sides, 1 % each; int8 of it would leave the largest alone.
    """
    sides = [torch.randn(48, 48) for _ in range(2)]
    f, x = (lambda x: torch.atan2(*(x @ side for side in sides))), rand(*X)
    (_, got), (_, want) = gradients(torch.compile(calling(f, X)[0], backend=BACKEND), [x]), gradients(Calls(f, X), [x])
    assert (got[0] - want[0]).norm() <= 0.05 * want[0].norm()


def test_sixteen_bits_of_which_all_are_wanted_stay_and_are_told() -> None:
    short = torch.eye(48, dtype=torch.bfloat16)
    model, buffers = calling(lambda x: positive(x.bfloat16() @ short).log(), X)
    gradients(torch.compile(model, backend=BACKEND), [rand(*X)])
    assert any("full precision" in why for why in buffers.full.values())


def test_a_result_and_an_argument_are_whose_they_are() -> None:
    """Their caller holds them: codes beside would be more, and what is written to them must be found."""

    class Result(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp() * x

    model, x = Result(), rand(*X)
    buffers = wrap(model)
    run = torch.compile(model, backend=BACKEND)
    y = run(x)
    (got,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(got, (x + 1) * x.exp())
    assert not saved(buffers)
    assert "holds them" in buffers.full["arguments and results"]


def test_a_view_of_a_result_is_the_result_s() -> None:
    class View(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.eye = torch.eye(48)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            made = x.flatten(0, -2) @ self.eye
            return made.view(X).square().sum(), made

    model, x = View(), rand(*X)
    buffers = wrap(model)
    y, _ = torch.compile(model, backend=BACKEND)(x)
    (got,) = torch.autograd.grad(y, x)
    torch.testing.assert_close(got, 2 * x)
    assert not saved(buffers)


def test_copies_of_weights_stay() -> None:
    """They do not grow with the batch, and their rounding would be the same in every step."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(48, 48)), nn.Parameter(torch.randn(48, 48))
            self.eye = torch.eye(48)

        def forward(self, x: Tensor) -> Tensor:
            return ((x.flatten(0, -2) @ self.eye) @ (self.a @ self.b)).sum()

    model, x = Product(), rand(*X)
    buffers = wrap(model)
    (got,) = torch.autograd.grad(torch.compile(model, backend=BACKEND)(x), x)
    torch.testing.assert_close(got, (torch.ones(32, 48) @ (model.a @ model.b).mT).view(X), rtol=1e-4, atol=1e-4)
    assert "batch" in buffers.full["copies of weights"]
    assert saved(buffers) == {"int8"}  # of the product's other factor


def test_other_parts_of_the_graph_are_left_as_they_are() -> None:
    """A step that is compiled as a whole has losses in it, and models that nobody converted."""
    (model, buffers), inputs = calling(torch.square, X), [rand(*X)]
    eye = torch.eye(X[-1])

    def step(x: Tensor) -> Tensor:
        around = (x.flatten(0, -2) @ eye).view(X)
        return model(x) * 0 + (around**3).sum() + around.exp().sum()

    def alone(x: Tensor) -> Tensor:
        around = (x.flatten(0, -2) @ eye).view(X)
        return (around**3).sum() + around.exp().sum()

    (_, got), (_, want) = gradients(torch.compile(step, backend=BACKEND), inputs), gradients(alone, inputs)
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    assert saved(buffers) == {"int8"}


def test_a_graph_without_a_converted_model_is_cut_as_pytorch_cuts_it() -> None:
    cuts = []

    def both(gm: Any, joint_inputs: Any, **options: Any) -> Any:
        theirs = min_cut_rematerialization_partition(copy.deepcopy(gm), joint_inputs, **options)
        ours = compiled.partition(gm, joint_inputs, **options)
        cuts.append([(half.code, other.code) for half, other in zip(ours, theirs, strict=True)])
        return ours

    torch.compile(Calls(torch.square, X), backend=_backend(both))(rand(*X)).backward()
    ((forward, backward),) = cuts
    assert forward[0] == forward[1]
    assert backward[0] == backward[1]


class Gate(nn.Module):
    """Norms, gates and quotients between layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide, self.out = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.glu(self.wide(self.norm(x)), -1)
        return x + self.out(F.hardswish(y) / (1 + y.square()))


class Gated(nn.Module):
    """Two blocks, or three with a checkpointed one between."""

    def __init__(self, width: int = 64, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gate(width) for _ in range(3 if checkpointed else 2))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed and number == 1 else block(x)
        return x


@contextlib.contextmanager
def _operators_for(size: int) -> Iterator[None]:
    """Operators that support from that many entries on."""
    from hotrain.compress.operators import base

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "SMALL", size)
        yield


def step_of(model: nn.Module, x: Tensor) -> Tensor:
    model.zero_grad()
    model(x).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    ("method", "checkpointed"), [("exact", False), ("hq8", True)], ids=["exact", "hq8 checkpointed"]
)
def test_a_model_of_gates(method: str, checkpointed: bool) -> None:
    """Together with operators, and one row a compiled model: less is kept than by the plain cut, gradients are as near
    as eager's; its size may change from step to step."""
    torch.manual_seed(0)
    model = Gated(checkpointed=checkpointed)
    exact = copy.deepcopy(model)
    report = hotrain.convert(model, method, memory="block")
    assert report.buffers is not None
    with _operators_for(100):
        counter = CompileCounterWithBackend(BACKEND)
        run, plain = torch.compile(model, backend=counter, fullgraph=True), torch.compile(model, backend=PLAIN)
        for batch in (4, 6, 9) if method == "exact" else (4, 6):
            x = torch.randn(batch, 16, 64)
            got, eager, want = step_of(run, x), step_of(model, x), step_of(exact, x)
            assert (got - want).norm() <= 1.3 * (eager - want).norm() + 1e-3 * want.norm()
        assert counter.frame_count == 2  # of hq8, whose tiles are of a number of tokens, one for each
        assert saved(report.buffers) >= {"int8"}
        x = torch.randn(4, 16, 64)
        mine = kept_bytes(run, [x])
        torch._dynamo.reset()
        assert mine < 0.9 * kept_bytes(plain, [x])
    if checkpointed:
        assert "recomputed" in report.buffers.full["checkpoint"], report


def test_scales_and_statistics_of_codes_stay() -> None:
    """What hotrain's own operators keep is left alone, however small "large" is: without anything else in a model,
    gradients are those of the plain cut."""

    class Served(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
            self.conv, self.batch = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.batch(self.conv(x.view(-1, 16, 8, 8)))).view(x.shape)
            q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, 32).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            return self.out(F.gelu(y) * torch.sigmoid(y)).softmax(-1)

    torch.manual_seed(0)
    model, x = Served(), torch.randn(4, 16, 64)
    report = hotrain.convert(model, "exact", memory="block")
    assert report.buffers is not None
    with _operators_for(2), pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "SMALL", 2)
        got = step_of(torch.compile(copy.deepcopy(model), backend=BACKEND), x)
        torch._dynamo.reset()
        want = step_of(torch.compile(model, backend=PLAIN), x)
    assert (got - want).norm() <= 1e-6 * want.norm()


def test_what_was_not_seen_is_said_and_then_not_any_more() -> None:
    """A backend that cuts by itself, or a cache, leaves hotrain without a look."""
    model, buffers = calling(torch.square, X)
    gradients(torch.compile(model, backend="aot_eager"), [rand(*X)])
    assert UNCUT in str(buffers)
    torch._dynamo.reset()
    gradients(torch.compile(model, backend=BACKEND), [rand(*X)])
    assert UNCUT not in str(buffers)


def test_of_a_graph_that_was_not_seen_the_report_says_how_to_measure_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what exact keeps, as of any other. Inductor's cache hides the graph of the second run of a script."""
    monkeypatch.setattr(hotrain.compiling, "compile_in_mode", lambda m, _: torch.compile(m, backend="aot_eager"))
    fast = hotrain.compile(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):  # within them nothing is read
        fast(torch.randn(4, 64, 64)).sum().backward()
    said = "kept for backward of the first batch (4×64×64): not seen; exact keeps 192.00 KiB, and hotrain.saved_bytes"
    assert said in str(fast.report)


def test_the_report_says_that_a_gpu_waits_for_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of training forwards, and until the model is compiled; on a CPU nothing waits."""
    model, buffers = calling(torch.square, X)
    gradients(model, [rand(*X)])
    assert EAGER not in str(buffers)
    monkeypatch.setattr(sys.modules["hotrain.compress.interpose"], "_is_on_gpu", lambda *_: True)
    model.eval()
    model(rand(*X))
    assert EAGER not in str(buffers)
    gradients(model.train(), [rand(*X)])
    assert EAGER in str(buffers)
    gradients(torch.compile(model, backend=BACKEND), [rand(*X)])
    assert EAGER not in str(buffers)


class Theirs(CustomPartitionerFn):
    """Somebody's own partitioner."""

    def __init__(self, key: Any = "theirs") -> None:
        self.key, self.calls = key, 0

    def __call__(self, gm: Any, joint_inputs: Any, **options: Any) -> Any:
        self.calls += 1
        return min_cut_rematerialization_partition(gm, joint_inputs, **options)

    def uuid(self) -> Any:
        return self.key


def test_another_partitioner_stays_in_charge_of_the_cut() -> None:
    theirs = Theirs()
    torch._inductor.config.custom_partitioner_fn = theirs
    model, buffers = calling(torch.square, X)
    buffers.region()
    buffers.region()  # once is enough
    ours = torch._inductor.config.custom_partitioner_fn
    assert isinstance(ours, compiled.Partitioner)
    assert ours.inner is theirs
    gradients(torch.compile(model, backend=_backend(ours)), [rand(*X)])
    assert theirs.calls == 1
    assert saved(buffers) == {"int8"}


def test_the_key_in_a_cache() -> None:
    """Of these files and of the other partitioner; None, which is for "not to be cached", stays None."""
    alone, other = compiled.Partitioner().uuid(), compiled.Partitioner(Theirs()).uuid()
    assert alone == compiled.Partitioner().uuid()
    assert alone != other
    assert compiled.Partitioner(Theirs(None)).uuid() is None


def test_a_graph_of_a_converted_model_has_a_name_of_its_own() -> None:
    """Caches know a graph by its code: an unconverted model's must not be taken for it."""
    codes = []

    def look(gm: Any, inputs: Any) -> Any:
        codes.append(gm.code)
        return gm.forward

    torch.compile(calling(torch.square, X)[0], backend=look)(rand(*X))
    torch._dynamo.reset()
    torch.compile(Calls(torch.square, X).train(), backend=look)(rand(*X))
    assert "torch.ops.hotrain.region" in codes[0]
    assert "hotrain" not in codes[1]


def test_a_report_outlives_nothing() -> None:
    """What is known of regions goes with the models."""
    model, buffers = calling(torch.square, X)
    gradients(torch.compile(model, backend=BACKEND), [rand(*X)])
    name = buffers.name
    assert name in compiled._regions
    del model, buffers
    torch._dynamo.reset()
    gc.collect()
    assert name not in compiled._regions


@pytest.mark.slow
def test_inductor_is_told_by_itself() -> None:
    """By the one call that users make; and what it compiles keeps less and learns the same."""
    torch.manual_seed(0)
    model, x = Gate(64), torch.randn(8, 64, 64)
    exact = copy.deepcopy(model)
    report = hotrain.convert(model, "exact", memory="block")
    assert report.buffers is not None
    run: Any = torch.compile(model, fullgraph=True)
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        got, eager, want = step_of(run, x), step_of(model, x), step_of(exact, x)
        kept = kept_bytes(run, [x])
    assert (got - want).norm() <= 1.3 * (eager - want).norm()
    assert UNCUT not in str(report.buffers)
    assert saved(report.buffers) >= {"int8"}
    assert kept < 0.6 * kept_bytes(torch.compile(exact, backend=PLAIN), [x])


@pytest.mark.parametrize("f", [torch.square, torch.exp], ids=["codes", "derivative"])
def test_codes_are_made_where_the_tensor_is(f: Callable[[Tensor], Tensor]) -> None:
    """Not at the end of forward, until which all tensors would be alive."""
    orders = []

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.eye = torch.eye(48)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = (f(x.flatten(0, -2) @ self.eye) * 0.1).view(X)
            return x.sum()

    def look(gm: Any, joint_inputs: Any, **options: Any) -> Any:
        halves = compiled.partition(gm, joint_inputs, **options)
        orders.append([node.name for node in halves[0].graph.nodes])
        return halves

    model = Deep()
    wrap(model)
    torch.compile(model, backend=_backend(look))(rand(*X)).backward()
    (order,) = orders
    first = next(name for name in order if "_codes_" in name)
    assert order.index(first) < order.index("mm_1")


@pytest.mark.parametrize("batch", [1, 2])
def test_a_convolution_of_a_turned_image_has_a_result_of_pytorchs_strides(batch: int) -> None:
    """A turned image whose channels are side by side is not in channels_last, to PyTorch: views of the result work."""

    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(16, 24, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(torch.tanh(x.transpose(2, 3)))

    x = torch.randn(batch, 16, 48, 40).contiguous(memory_format=torch.channels_last)
    exact = Turning()
    model = copy.deepcopy(exact)
    hotrain.convert(model, "exact", memory="block")
    assert torch.compile(model, backend=BACKEND)(x).stride() == exact(x).stride()


COMPOSED: dict[str, Callable[[Tensor], Tensor]] = {
    "mish": lambda x: x * torch.tanh(F.softplus(x)),
    "two saturating functions": lambda x: torch.tanh(x) * F.softplus(x),
    "bits, and softplus": lambda x: F.relu(x) * F.softplus(x),
    "bits, and a square": lambda x: 0.9 * F.relu(x) ** 2 + x,
}


@pytest.mark.parametrize("name", COMPOSED)
def test_what_codes_are_made_of_again_in_backward_is_packed(name: str) -> None:
    """A derivative needs x, so that the cut saves x and makes a product's codes of it in backward: x is no more exact
    than its codes, which a whole tensor in full precision is not for."""

    class Composed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(COMPOSED[name](self.first(x)))

    torch.manual_seed(0)
    model, x = Composed(), torch.randn(8, 256, 64)
    exact = copy.deepcopy(model)
    report = hotrain.convert(model, "exact", memory="block")
    assert report.buffers is not None
    run, eager, want = torch.compile(model, backend=BACKEND), step_of(model, x), step_of(exact, x)
    got, kept = step_of(run, x), kept_bytes(run, [x])
    assert report.buffers.full == {}
    # In 8 bits x adds less to the error than the product's 4 bits have.
    assert (got - want).norm() <= 1.3 * (eager - want).norm()
    # x of each layer and the product's in 8 bits at most, of 32.
    assert kept <= 3 * x.numel() * 1.1 + sum(4 * p.numel() for p in model.parameters())


def test_words() -> None:
    """One class for all uses of a tensor."""
    for classes, whole in {
        (rules.VALUE,): rules.VALUE,
        (rules.VALUE, rules.SHAPE): rules.VALUE,
        (rules.SHAPE,): rules.SHAPE,
        (rules.SIGN, rules.SHAPE): rules.SIGN,
        (rules.SIGN, rules.VALUE): rules.RATIO,  # int8 would make zeros, whose sign is none
        (rules.RATIO, rules.VALUE): rules.RATIO,
        (rules.EXACT, rules.VALUE): rules.EXACT,
        (graph.OURS, rules.EXACT): graph.OURS,
        (): rules.SHAPE,
    }.items():
        assert graph.Uses(classes=set(classes)).whole == whole


# row of the rule book, a call that it is about, how many tensors that takes
ROWS: list[tuple[rules.Rule, Callable[..., Tensor], int]] = [
    (rules.MUL, lambda a, b: a * b, 2),
    (rules.MATMUL, lambda a, b: torch.bmm(a, b.mT), 2),
    (rules.LINEAR, lambda a, b: F.linear(a, b[0]), 2),
    (rules.CONVOLUTION, lambda x, w: F.conv1d(x, w[:, :, :40]), 2),
    (rules.DIVISION, lambda a, b: a / b, 2),
    (rules.ADDCDIV, lambda a, b, c: torch.addcdiv(a, b, c), 3),
    (rules.ROOTS, torch.rsqrt, 1),
    (rules.LOG, torch.log, 1),
    (rules.POLYNOMIAL, lambda x: x**3, 1),
    (rules.POWER, lambda x: x**2.5, 1),
    (rules.EXPONENTIAL, torch.exp, 1),
    (rules.NORM, lambda x: x.norm(dim=-1), 1),
    (rules.SMOOTH, F.softplus, 1),
    (rules.ELU, F.elu, 1),
    (rules.ABSOLUTE, torch.abs, 1),
    (rules.POOLING, lambda x: F.adaptive_avg_pool2d(x.view(2, 3, 16, 16), 5), 1),
    (rules.GATHER, lambda x: x.gather(0, torch.zeros(1, *x.shape[1:], dtype=torch.int64)), 1),
    (rules.INDEX_ADD, lambda x: torch.zeros_like(x).index_add(0, torch.arange(len(x)), x), 1),
]


@pytest.mark.parametrize(("rule", "f", "count"), ROWS, ids=[rule.name for rule, _, _ in ROWS])
def test_eager_mode_and_compiled_graphs_follow_one_row(
    rule: rules.Rule, f: Callable[..., Tensor], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors are kept in the forms of the row in both; where ``compiled`` says how they differ, they do."""
    monkeypatch.setattr(eager, "SMALL", 100)
    inputs = [torch.rand(X).add(0.5).requires_grad_() for _ in range(count)]
    forms = {rules.FORM[use] for use in (rule.saved, *rule.arguments.values())} - {""}
    buffers = Buffers()
    with Compressed(buffers):
        f(*(t + 0 for t in inputs))
    assert _forms(buffers) == forms
    model, buffers = calling(f, *[X] * count)
    gradients(torch.compile(model, backend=BACKEND, fullgraph=True), inputs)
    assert (_forms(buffers) == forms) == (rule not in (rules.ELU, rules.GATHER, rules.INDEX_ADD))
    assert _forms(buffers) or rule in (rules.GATHER, rules.INDEX_ADD), "of these a graph saves nothing"


def _forms(buffers: Buffers) -> set[str]:
    return {form for form in ", ".join(saved(buffers)).replace("its derivative in ", "").split(", ") if form}


def test_every_row_that_rounds_is_among_them() -> None:
    assert [rule for rule in rules.RULES if rule.rounds] == [rule for rule, _, _ in ROWS]
    assert len({rule.name for rule in rules.RULES}) == len(rules.RULES)


class Statistics(nn.Module):
    """A norm's input that a compiler could compute within its statistics."""

    def __init__(self, norm: nn.Module, concatenated: bool = False) -> None:
        super().__init__()
        self.conv, self.norm, self.concatenated = nn.Conv2d(4, 16, 3, padding=1), norm, concatenated

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        pooled = F.avg_pool2d(y, 3, 1, 1) - y
        return (self.norm(torch.cat([y, pooled], 1) if self.concatenated else pooled) * 2).sum()


@pytest.mark.parametrize(
    ("norm", "concatenated", "written"),
    [
        (lambda: nn.BatchNorm2d(16), False, {torch.ops.aten.sub.Tensor}),
        (lambda: nn.BatchNorm2d(32), True, {torch.ops.aten.cat.default}),
        (lambda: nn.GroupNorm(1, 16), False, {torch.ops.aten.sub.Tensor}),
        # One pass over a row, in which a compiler has all of it.
        (lambda: nn.LayerNorm(8), False, set()),
        (nn.Identity, False, set()),
    ],
    ids=["batch norm", "of a concatenation", "group norm", "layer norm", "none"],
)
def test_the_input_of_statistics_over_several_axes_is_written_before(
    norm: Callable[[], nn.Module], concatenated: bool, written: set[Any]
) -> None:
    """As exact training, which saves it, has it in memory; a reduction would compute it again in each of its passes."""
    found = set()

    def look(gm: torch.fx.GraphModule, _: Any) -> Any:
        found.update(n.target for n in gm.graph.nodes if n.meta.get("inductor_realize_to_strides"))
        return make_boxed_func(gm.forward)

    model = Statistics(norm(), concatenated).train()
    hotrain.convert(model, "exact", memory="block")
    backend = aot_autograd(
        fw_compiler=look, bw_compiler=look, partition_fn=compiled.partition, decompositions=select_decomp_table()
    )
    torch.compile(model, backend=backend, fullgraph=True)(torch.randn(8, 4, 8, 8)).backward()
    assert found == written


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_the_weights_gradient_of_a_convolution_is_computed_before_its_inputs(trained: bool) -> None:
    """In one call with it, x, which is dequantized for g_w alone, would be in memory beside g_x."""
    masks = []

    def look(gm: torch.fx.GraphModule, _: Any) -> Any:
        nodes = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution_backward.default)
        masks.extend(n.args[-1] for n in sorted(nodes))
        return make_boxed_func(gm.forward)

    torch.manual_seed(0)
    exact = nn.Sequential(nn.Conv2d(4, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 16, 3, stride=2)).train()
    exact[2].requires_grad_(trained)
    model = copy.deepcopy(exact)
    hotrain.convert(model, "exact", memory="block")
    backend = aot_autograd(
        fw_compiler=look, bw_compiler=look, partition_fn=compiled.partition, decompositions=select_decomp_table()
    )
    x, g = torch.randn(8, 4, 24, 24), torch.randn(8, 16, 11, 11)
    exact(x).backward(g)
    torch.compile(model, backend=backend, fullgraph=True)(x).backward(g)
    halves = [[False, True, True], [True, False, False]] if trained else [[True, False, False]]
    assert masks == [*halves, [False, True, True]]
    for (name, got), wanted in zip(model.named_parameters(), exact.parameters(), strict=True):
        if wanted.grad is not None:
            # Codes of 8 bits of x and of SiLU's: 1/254 of a row's largest each, over sums of hundreds of terms.
            assert got.grad is not None
            assert (got.grad - wanted.grad).norm() < 0.2 * wanted.grad.norm(), name


class Turned(nn.Module):
    """A layer whose x and g_y are images, channels first, seen as tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 96)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear((x * 2).permute(0, 2, 1)).permute(0, 2, 1).contiguous().sin()


def test_tokens_are_written_as_the_matrices_that_layers_read() -> None:
    """Else their operators copy them, element by element."""
    operands = []

    def look(gm: torch.fx.GraphModule, _: Any) -> Any:
        of_layers = [n for n in gm.graph.nodes if n.target in compiled._OF_TOKENS]
        operands.extend((n.target, n.args[0].meta["val"].is_contiguous()) for n in of_layers)
        assert all(n.meta[STRIDES][0][0].is_contiguous() for n in of_layers if STRIDES in n.meta)
        return make_boxed_func(gm.forward)

    torch.manual_seed(0)
    exact = Turned()
    model = copy.deepcopy(exact)
    hotrain.convert(model, filter_fn=lambda module, name: True)
    backend = aot_autograd(
        fw_compiler=look, bw_compiler=look, partition_fn=compiled.partition, decompositions=select_decomp_table()
    )
    x = torch.randn(8, 64, 128)
    want, got = exact(x), torch.compile(model, backend=backend, fullgraph=True)(x)
    assert torch.equal(got, want)
    for y in (want, got):
        y.square().mean().backward()
    assert operands == [(each, True) for each in compiled._OF_TOKENS[:2]]
    # 8 bits of x and of g_y: 1/254 of the largest each.
    assert (model.linear.weight.grad - exact.linear.weight.grad).norm() < 0.05 * exact.linear.weight.grad.norm()

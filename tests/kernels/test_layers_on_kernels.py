"""Converted layers whose steps the kernels run, in eager and compiled; on a CPU in the interpreter."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

import hotrain
from hotrain import autograd, draws, kernels, published
from hotrain.geometry import Geometry
from hotrain.kernels import dispatch, operands, quantize_kernels
from hotrain.layer import Config
from hotrain.layer_record import AmaxHistory
from hotrain.nn.state import layer_states
from hotrain.saved import Grouped
from hotrain.transform.tokens import Recent, layout


@pytest.fixture(autouse=True)
def _kernels_here(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if device.type == "cpu":
        monkeypatch.setattr(autograd, "KERNELS", dict.fromkeys(("cpu", "cuda"), kernels))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pair(method: str | hotrain.Method, device: torch.device, **options: object) -> tuple[nn.Module, nn.Module]:
    """A small net converted, and its exact twin."""
    torch.manual_seed(0)
    exact = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(device)
    net = copy.deepcopy(exact)
    hotrain.convert(net, method, plan="memory", **options)
    return net, exact


def grads(net: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    net(x).square().mean().backward()
    found = [x.grad, *(p.grad for p in net.parameters())]
    net.zero_grad()
    return [g.clone() for g in found if g is not None]


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hot-unbiased", {"number": "int"}),
        ("hot-unbiased", {"number": "e4m3"}),
        ("hot-unbiased", {"number": "e4m3", "forward": "fp8"}),
        ("hq4", {}),  # x in int4 with scales of rows
        ("hot-importance", {}),  # rows that are picked in backward
        (hotrain.preset("hot-importance", saved_bits=8), {}),  # from codes of 8 bits
        (hotrain.preset("hot-importance", number="e4m3"), {}),  # of g_y in fp8
    ],
    ids=str,
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_on_kernels_follows_the_definition(name, options, compiled, device):
    """Same key, same draws: what differs is float32 rounding, and e4m3's underflow."""
    net, _ = pair(name, device, **options)
    x = torch.randn(2, 32, 32, device=device)
    hotrain.manual_seed(3)
    run = torch.compile(net, backend="aot_eager", fullgraph=True) if compiled else net
    on_kernels = grads(run, x)
    hotrain.manual_seed(3)
    with kernels.disabled():
        by_definition = grads(net, x)
    for a, b in zip(on_kernels, by_definition, strict=True):
        assert relative(a, b) <= 1e-2
    assert all(state.calls for _, state in layer_states(net))


@pytest.mark.parametrize("method", ["hq8", "hot-unbiased"])
def test_a_default_device_changes_nothing(method, device):
    """On meta a tensor has no data. Places and constants are made first with it, then used without."""
    nets = [pair(method, device, number="int")[0] for _ in range(2)]
    x = torch.randn(3, 23, 32, device=device)
    quantize_kernels._plans.clear()
    quantize_kernels._index.cache_clear()
    quantize_kernels.natural_rows.cache_clear()
    hotrain.manual_seed(3)
    with torch.device("meta"):
        got = grads(nets[0], x)
    hotrain.manual_seed(3)
    assert all(map(torch.equal, got, grads(nets[1], x)))


def test_a_convolution_of_patches_runs_on_them_compiled(device):
    """A patch embedding and a 1×1 convolution are Linear layers of their positions."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 32, 4, stride=4), nn.Conv2d(32, 48, 1)).to(device)
    hotrain.convert(net, "hot", filter_fn=lambda m, n: True, number="int", plan="memory")
    x = torch.randn(2, 3, 16, 16, device=device)
    by_kernels = grads(torch.compile(net, backend="aot_eager", fullgraph=True), x)
    with kernels.disabled():
        hotrain.manual_seed(0)
        by_definition = grads(net, x)
    hotrain.manual_seed(0)
    for a, b, c in zip(by_kernels, by_definition, grads(net, x), strict=True):
        assert relative(a, c) <= 0.5
        assert relative(c, b) <= 1e-2


@pytest.mark.parametrize("forward", ["fp8", "int8"])
def test_the_forward_in_low_precision_is_near_the_exact_one(forward, device):
    net, exact = pair("hot-unbiased", device, number="int", forward=forward)
    x = torch.randn(2, 32, 32, device=device)
    # Both operands of two products carry e4m3's 2⁻⁴ at most, 2.6 % in the mean, int8's less.
    assert 0 < relative(net(x), exact(x)) <= 0.08
    assert "y:" + forward in str(net[0]._hotrain.method)


def test_a_checkpointed_forward_is_recomputed_alike(device):
    net, _ = pair("hot-unbiased", device, number="e4m3")
    x = torch.randn(2, 32, 32, device=device)
    for _ in range(2):  # the second time the scales are guessed in both
        hotrain.manual_seed(5)
        plain = grads(net, x)
        hotrain.manual_seed(5)
        again = _checkpointed(net, x)
    for a, b in zip(plain, again, strict=True):
        assert relative(a, b) <= 1e-2


def _checkpointed(net: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    checkpoint(net, x, use_reentrant=False).square().mean().backward()
    found = [x.grad, *(p.grad for p in net.parameters())]
    net.zero_grad()
    return [g.clone() for g in found if g is not None]


def test_accumulation_makes_a_weights_codes_once_a_step(device, monkeypatch):
    from hotrain.kernels import dispatch

    made = []
    real = dispatch._weight_codes
    monkeypatch.setattr(dispatch, "_weight_codes", lambda *a: made.append(1) or real(*a))
    net, _ = pair("hot-unbiased", device, number="e4m3")
    x = torch.randn(2, 32, 32, device=device)
    with hotrain.accumulation():
        first = grads(net, x)
        grads(net, x)
        assert len(made) == 2, "two layers"
        with torch.no_grad():
            net[0].weight.mul_(2.0)  # an optimizer's step: the version moves on
        grads(net, x)
        assert len(made) == 3
    grads(net, x)
    assert len(made) == 5, "nothing outlives the block"
    assert all(g.isfinite().all() for g in first)


def test_numbers_are_chosen_by_the_device(device, monkeypatch):
    net, _ = pair("hot-unbiased", device)
    state = net[0]._hotrain
    before = state.method
    monkeypatch.setattr(kernels, "has_fp8", lambda _: False)
    state.choose_numbers(device)
    assert state.running.grad_weight.number == "int"
    monkeypatch.setattr(kernels, "has_fp8", lambda _: True)
    monkeypatch.setattr(autograd, "KERNELS", dict.fromkeys(("cpu", "cuda"), kernels))
    state.choose_numbers(torch.device("cuda"))
    assert state.running.grad_weight.number == "e4m3"
    assert state.method is before, "a frozen method stays what it was"
    with pytest.raises(ValueError, match="number='fp9'"):
        hotrain.convert(net, "hot", number="fp9")
    with pytest.raises(ValueError, match="plan='fast'"):
        hotrain.convert(net, "hot", plan="fast")


@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_that_loses_stays_exact_and_the_report_says_so(compiled, device, monkeypatch):
    from hotrain import planning

    net, _ = pair("hot", device)
    asked = []

    def verdict(question: planning.Question, graphs: bool, unpacks: bool) -> str | None:
        asked.append(question)
        return "slower on this GPU: 0.200 ms/step, exact 0.100 ms/step" if question.w == (64, 32) else None

    monkeypatch.setattr(planning, "verdict", verdict)
    monkeypatch.setattr(planning, "rehearse", lambda _: None)
    monkeypatch.setattr(kernels, "reason", lambda *_: None)
    monkeypatch.setattr(autograd, "KERNELS", dict.fromkeys(("cpu", "cuda"), kernels))
    report = hotrain.convert(net, "hot", number="int")
    state = type(net[0]._hotrain)
    monkeypatch.setattr(state, "_question", _as_if_on_a_gpu(state._question))
    run = torch.compile(net, backend="aot_eager", fullgraph=True) if compiled else net
    grads(run, torch.randn(2, 32, 32, device=device))
    assert [row.name for row in report.kept] == ["0"]
    assert "0.200 ms" in report.kept[0].reason
    assert [row.name for row in report.converted] == ["2"]
    assert {q.w for q in asked} == {(64, 32), (32, 64)}
    assert all(q.needs_x for q in asked)


def test_a_frozen_layer_is_rehearsed_when_it_is_traced(device, monkeypatch):
    """As the others are: what its step caches would be in the memory of a CUDA graph."""
    from hotrain import planning

    net, _ = pair("hot", device)
    net[0].weight.requires_grad_(False)
    rehearsed = []
    monkeypatch.setattr(planning, "rehearse", rehearsed.append)
    hotrain.convert(net, "hot", number="int", plan="memory")
    state = type(net[0]._hotrain)
    monkeypatch.setattr(state, "_question", _as_if_on_a_gpu(state._question))
    x = torch.randn(2, 32, 32, device=device, requires_grad=True)
    torch.compile(net, backend="aot_eager", fullgraph=True)(x).sum().backward()
    assert [(q.w, q.trained) for q in rehearsed] == [((64, 32), False), ((32, 64), True)]


def _as_if_on_a_gpu(question):
    return lambda self, facts, geometry: question(self, (*facts[:2], torch.device("cuda"), *facts[3:]), geometry)


def test_index_tensors_of_many_lengths_are_not_held_by_plans(device, monkeypatch):
    """Each plan held its own for ever, on the GPU: a step for each of many lengths took more memory each time."""
    found, make = [], quantize_kernels._index.make

    def noted(*args):
        made = make(*args)
        found.append(weakref.ref(made[0]))
        return made

    monkeypatch.setattr(quantize_kernels, "_index", Recent(noted, 1, 2))
    monkeypatch.setattr(quantize_kernels, "_plans", {})
    method, key = hotrain.preset("hq8", number="int"), torch.zeros((), dtype=torch.int64, device=device)
    history = AmaxHistory.on(device)
    for tokens in range(33, 41):
        lay = layout((1, tokens), 16, 16, 0, "auto", None, True)
        dispatch.keep(torch.randn(tokens, 32, device=device), method, lay, key, history)
    assert len(found) >= 8
    assert sum(reference() is not None for reference in found) <= 2


def made_by(caches):
    """How often each has made what it holds."""
    return [cache.misses if isinstance(cache, Recent) else cache.cache_info().misses for cache in caches]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hot-unbiased", {"number": "e4m3"}),
        ("hot-unbiased", {"number": "int"}),
        ("hot-unbiased", {"number": "e4m3", "forward": "fp8"}),
        ("hot-importance", {"number": "int"}),
        ("hot-importance", {"number": "e4m3"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("trained", [True, False])
def test_a_rehearsal_leaves_nothing_to_be_made_in_a_step(name, options, trained, device, monkeypatch):
    """In a CUDA graph's warm-up no tensor may be made that outlives the step: all of them are cached by then.

    A frozen weight's step has other ones: without g_w, g_y is read in no tile's order.
    """
    from hotrain import planning

    dtype = torch.float16  # float32 has blocks of one size
    device = torch.empty(0, device=device).device  # with its index, as a layer's tensors have it

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    caches = (quantize_kernels._index, quantize_kernels.natural_rows, operands.no_key)
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setattr(quantize_kernels, "_plans", {})
    method = hotrain.preset(name)
    if "number" in options:
        method = method.override(number=options["number"])
    method = method.override(forward=options.get("forward", "exact"))
    kernels.prepare(device)  # as when a layer is placed
    planning.rehearse(
        planning.Question((2, 50, 32), (48, 32), dtype, dtype, True, True, trained, method, None, False, None, device)
    )
    made = made_by(caches)
    plans = len(quantize_kernels._plans)
    assert plans
    net = nn.Linear(32, 48).to(device, dtype)
    net.weight.requires_grad_(trained)
    hotrain.convert(net, name, plan="memory", filter_fn=lambda m, n: True, **options)
    x = torch.randn(2, 50, 32, device=device, dtype=dtype, requires_grad=True)
    net(x).square().sum().backward()
    assert made_by(caches) == made
    assert len(quantize_kernels._plans) == plans
    # In a compiled step the layer may be in front of an activation function, whose gradient it reads as codes.
    words, spec = AmaxHistory.on(device).words, Config(method, kernels=True).word
    key = torch.zeros((), dtype=torch.int64, device=device)
    x, w, kept = x.detach(), net.weight.detach(), (None, None)
    if trained and method.forward != "exact":
        _, *kept = torch.ops.hotrain.forward(x, w, None, key, words, spec, True)
    elif trained:
        kept = torch.ops.hotrain.keep(x, key, words, spec)
    g = torch.randn(2, 50, 48, device=device, dtype=dtype)
    of_x = Grouped(8).keep(g.view(100, 48))
    needs = [True, trained, True]
    parts = torch.ops.hotrain.grad_codes_behind(g, *of_x, "gelu", "int8", kept[1], key, words, spec, needs)
    rest = ("", [2, 50], dtype, dtype, 48, 32, [True, trained, False])
    torch.ops.hotrain.products_of_codes(list(parts[:4]), w, *kept, key, words, spec, *rest)
    assert made_by(caches) == made


@pytest.mark.parametrize("name", ["hq8", "hot-unbiased"])
@pytest.mark.parametrize("trained", [True, False])
def test_nor_does_one_of_a_pointwise_convolution(name, trained, device, monkeypatch):
    """An MLP of 1×1 convolutions, as PoolFormer's, reads the gradient of its GELU as codes too."""
    from hotrain import planning

    dtype = torch.float16
    device = torch.empty(0, device=device).device
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    caches = (quantize_kernels._index, quantize_kernels.natural_rows, operands.no_key)
    for cache in caches:
        cache.cache_clear()
    method = hotrain.preset(name, number="e4m3")  # whose blocks of g_y and of its codes differ
    kernels.prepare(device)
    geometry = Geometry((1, 1), (1, 1), (0, 0), (1, 1), 1, "zeros")
    planning.rehearse(
        planning.Question(
            (2, 32, 5, 10), (48, 32, 1, 1), dtype, dtype, True, True, trained, method, None, False, geometry, device
        )
    )
    made = made_by(caches)
    assert made[0]
    words, spec = AmaxHistory.on(device).words, Config(method, geometry=geometry, kernels=True).word
    key = torch.zeros((), dtype=torch.int64, device=device)
    x, g = (torch.randn(2, 5, 10, channels, device=device, dtype=dtype) for channels in (32, 48))
    kept = torch.ops.hotrain.keep(x, key, words, spec) if trained else (None, None)
    of_x = Grouped(8).keep(g.view(100, 48))
    torch.ops.hotrain.grad_codes_behind(g, *of_x, "gelu", "int8", kept[1], key, words, spec, [True, trained, True])
    assert made_by(caches) == made


@pytest.mark.parametrize("name", ["hq8", "hot", "hot-unbiased", "hot-importance", "hq4", "hla"])
@pytest.mark.parametrize("number", ["int", "e4m3"])
@pytest.mark.parametrize("trained", [True, False])
def test_a_layer_in_front_of_a_function_reads_its_gradient_as_codes(name, number, trained, device):
    """The operators return what a compiler is told, and the gradients are those of the function's gradient, to a few
    steps of the codes; of a method with an exact g_x, which reads g_y itself, nothing is asked."""
    method = hotrain.preset(name)
    if number == "e4m3" and name in ("hot", "hq4", "hla"):
        pytest.skip("in integers, by definition")
    method = method if name in ("hot", "hq4", "hla") else method.override(number=number)
    needs = [True, trained, True]
    if not kernels.reads_codes_alone(method, needs):
        assert name == "hla"
        return
    ours, words, key = torch.ops.hotrain, AmaxHistory.on(device).words, torch.tensor(3, device=device)
    spec, check = Config(method, kernels=True).word, ("test_faketensor",)
    x, w, g = (torch.randn(*size, device=device) for size in ((2, 50, 32), (48, 32), (2, 50, 48)))
    of_x = Grouped(8).keep(torch.randn(100, 48, device=device))
    kept = ours.keep(x, key, words, spec) if trained else (None, None)
    behind = (g, *of_x, "gelu", "int8")
    want = (ours.activation_gradient(*behind, False)[0], w, *kept, key)
    want = ours.linear_gradients(*want, AmaxHistory.on(device).words, spec, "", torch.float32, 32, needs)
    of_codes = (*behind, kept[1], key, words, spec, needs)
    torch.library.opcheck(ours.grad_codes_behind, of_codes, test_utils=check)
    *parts, sums = ours.grad_codes_behind(*of_codes)
    rest = (w, *kept, key, words, spec, "", [2, 50], torch.float32, torch.float32, 48, 32, [*needs[:2], False])
    torch.library.opcheck(ours.products_of_codes, (parts, *rest), test_utils=check)
    got = (*ours.products_of_codes(parts, *rest)[:2], sums)
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape
        assert (one - other).norm() <= 0.02 * other.norm()


@pytest.mark.parametrize("name", ["hq8", "hot", "hot-unbiased", "hot-importance", "hq4"])
@pytest.mark.parametrize("number", ["int", "e4m3"])
@pytest.mark.parametrize("tokens", [64, 50], ids=["whole blocks", "a block with empty slots"])
def test_a_layer_reads_a_gradient_of_three_parts(name, number, tokens, device):
    """Bit for bit what it computes of the parts side by side, in both calls of an amax history: the first writes its
    codes again. Parts in another order in memory are read as well."""
    method = hotrain.preset(name)
    if number == "e4m3" and name in ("hot", "hq4"):
        pytest.skip("in integers, by definition")
    method = method if name in ("hot", "hq4") else method.override(number=number)
    ours, key, needs = torch.ops.hotrain, torch.tensor(3, device=device), [True, True, True]
    spec = Config(method, kernels=True).word
    x, w = torch.randn(2, tokens, 32, device=device), torch.randn(192, 32, device=device)
    joined = torch.randn(2, tokens, 192, device=device) * torch.tensor(
        [1.0, 8.0, 0.1], device=device
    ).repeat_interleave(64)
    kept = ours.keep(x, key, AmaxHistory.on(device).words, spec)
    rest = ("", [2, tokens], torch.float32, torch.float32, 192, 32, [True, True, False])
    one, other = AmaxHistory.on(device).words, AmaxHistory.on(device).words
    for parts in ([part.contiguous() for part in joined.chunk(3, 2)], list(joined.chunk(3, 2))):
        want = ours.linear_gradients(joined, w, *kept, key, one, spec, "", torch.float32, 32, needs)
        args = (parts, kept[1], key, other, spec, needs)
        *codes, sums = ours.grad_codes_of_parts(*args)
        got = (*ours.products_of_codes(codes, w, *kept, key, other, spec, *rest)[:2], sums)
        assert all(map(torch.equal, got, want))
        torch.library.opcheck(ours.grad_codes_of_parts, args, test_utils=("test_faketensor",))


def test_what_no_kernel_supports_stays_exact_on_a_gpu_unless_memory_is_asked_for(device, monkeypatch):
    """The definition in plain PyTorch was 1.25 to 3.9 times slower than exact on an H200: nothing to measure."""
    from hotrain import planning

    monkeypatch.setattr(planning, "verdict", lambda *_, **__: pytest.fail("measured"))
    monkeypatch.setattr(autograd, "KERNELS", dict.fromkeys(("cpu", "cuda"), kernels))
    net = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1)).to(device)
    x = torch.randn(2, 32, 8, 8, device=device)
    state = type(hotrain.convert(net, "hot", plan="speed").layers[0][1])
    monkeypatch.setattr(state, "_question", _as_if_on_a_gpu(state._question))
    for plan, kept in (("speed", 1), ("graphs", 1), ("memory", 0)):
        report = hotrain.convert(net, "hot", plan=plan, number=None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the definition runs, under plan="memory"
            grads(net, x)
        assert len(report.kept) == kept
        if kept:
            assert "its patches overlap" in report.kept[0].reason


# a pair alone, a length that fills no program, more than one program; a start as blocks of rows have it
@pytest.mark.parametrize(("count", "start"), [(1, 0), (257, 0), (3000, 0), (17, 1), (1024, 48)])
def test_hashes_are_those_of_the_definition(count: int, start: int, device: torch.device) -> None:
    """The draws of layers that no kernel computes come from one, whatever the key's sign."""
    for word in torch.randint(-(1 << 63), (1 << 63) - 1, (4,)).tolist():
        key = operands.device_key(torch.tensor(word, device=device))
        assert key.hashes is not None
        got = draws.hash_bits(count, key, draws.GRAD_INPUT, device, start).cpu()
        assert torch.equal(got, draws.hash_bits(count, word % (1 << 64), draws.GRAD_INPUT, torch.device("cpu"), start))


# rows and an odd number of entries; an image in the order of its memory and not, with an odd number of positions, whose
# pairs of draws cross channels; more than one program
@pytest.mark.parametrize(
    ("shape", "channels_last"),
    [((5, 7), False), ((64, 96), False), ((2, 16, 3, 5), False), ((2, 16, 3, 5), True), ((3, 24, 4, 4), True)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_luq_is_that_of_the_definition(
    shape: tuple[int, ...], channels_last: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """To the bit: quotients are rounded as PyTorch rounds them, and floors are exponents."""
    t = torch.randn(shape).mul(torch.randn(shape).exp()).to(dtype)
    t.view(-1)[:3] = torch.tensor([0.0, -0.0, float(t.abs().max())])
    word = int(torch.randint(-(1 << 63), (1 << 63) - 1, ()))
    want, alpha = published.luq(t, word % (1 << 64), draws.GRAD_INPUT)
    given = t.to(device).contiguous(memory_format=torch.channels_last) if channels_last else t.to(device)
    key = operands.device_key(torch.tensor(word, device=device))
    got, same = published.luq(given, key, draws.GRAD_INPUT)
    assert same == alpha
    assert got.stride() == given.stride()
    assert torch.equal(got.cpu().to(want.dtype), want)
    assert len(want.unique()) >= 8, "zero and several powers of both signs"


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("at", ["nan", "inf", "-inf"])
def test_luq_passes_on_what_is_not_finite(at: str, device: torch.device) -> None:
    """A gradient scaler must see it."""
    t = torch.randn(16, 16)
    t[3, 4] = float(at)
    codes, alpha = published.luq(t.to(device), operands.device_key(torch.tensor(5, device=device)), draws.GRAD_INPUT)
    assert not (codes * alpha).isfinite().any()

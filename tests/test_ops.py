"""The operators behind `torch.compile`: their fakes promise what they return, and kernels are reached through them."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotrain
from hotrain import autograd, draws, functional
from hotrain.compress import rematerialize
from hotrain.compress.formats import GROUPED
from hotrain.draws import Draws
from hotrain.geometry import Geometry
from hotrain.layer import Config
from hotrain.layer_record import AmaxHistory
from hotrain.method import Method
from hotrain.transform.tokens import Layout

# What is kept differs: codes with one scale, with a per-row scale, two codes a byte, rows in x's precision, x itself.
METHODS = {
    "hot-unbiased": hotrain.preset("hot-unbiased"),
    "int4 rows": hotrain.preset("hot-unbiased", saved_bits=4),
    "hla": hotrain.preset("hla"),
    "hq4": hotrain.preset("hq4"),
    "lbp-wht": hotrain.preset("lbp-wht"),
}
EVERY = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())


@pytest.mark.parametrize("name", hotrain.presets())
@pytest.mark.parametrize("grid", [None, hotrain.Grid(7, 14, 1, dense_prefix=False)], ids=["no grid", "grid"])
@pytest.mark.parametrize("geometry", [None, Geometry((3, 3), (2, 2), "valid", groups=2)], ids=["linear", "conv2d"])
def test_a_configuration_survives_its_word(name: str, grid: hotrain.Grid | None, geometry: Geometry | None) -> None:
    """All that steers a gradient; the knobs of `override` do not, and the name tells layers apart."""
    config = Config(hotrain.preset(name), grid, geometry is None, geometry, True, "blocks.3.fc1")
    found = Config.of(config.word)
    assert dataclasses.replace(found, method=config.method) == config
    assert found.word == config.word
    assert "fc1" not in config.word
    for part in ("name", "grad_input", "grad_weight", "saved", "forward"):
        assert getattr(found.method, part) == getattr(config.method, part)


def layer() -> tuple[Draws, Tensor, Tensor]:
    """(draws, key, words of the amax history) of a layer placed on the CPU."""
    owner = Draws.of("layer")
    key = owner.next_on(torch.device("cpu"))
    assert owner.history is not None
    return owner, key, owner.history.words


# float64 keeps a scale of its own width; 50 and 33 fill no tile, 30 channels no block of the rotation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(2, 50, 30), (33, 64)], ids=str)
@EVERY
def test_fakes_promise_what_linear_operators_return(method: Method, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Shapes, dtypes and strides: compiled code relies on them without looking."""
    _, key, words = layer()
    draw, spec = key if method.draws else None, Config(method).word
    x, w = torch.randn(shape, dtype=dtype), torch.randn(48, shape[-1])
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.hotrain.keep, (x, draw, words, spec), test_utils=checks)
    codes, scale = torch.ops.hotrain.keep(x, draw, words, spec)
    g_y = torch.randn(*shape[:-1], 48, dtype=dtype)
    for needs in ([True, True, True], [False, True, False], [True, False, True]):
        kept = (codes, scale) if needs[1] else (None, None)
        weight = w if needs[0] else None
        args = (g_y, weight, *kept, draw, words, spec, "", torch.float32, shape[-1], needs)
        torch.library.opcheck(torch.ops.hotrain.linear_gradients, args, test_utils=checks)
    form = rematerialize.values("int8", shape)
    of_codes = (list(GROUPED["int8"].keep(x)), form, list(shape), dtype, draw, words, spec)
    torch.library.opcheck(torch.ops.hotrain.keep_from_codes, of_codes, test_utils=checks)
    again = torch.ops.hotrain.keep(rematerialize.make(form, of_codes[0], shape, dtype), draw, words, spec)
    assert all(torch.equal(a, b) for a, b in zip(torch.ops.hotrain.keep_from_codes(*of_codes), again, strict=True))


@EVERY
def test_fakes_promise_what_convolution_operators_return(method: Method) -> None:
    _, key, words = layer()
    geometry = Geometry((3, 3), (2, 2), (1, 1), groups=2)
    draw, spec = key if method.draws else None, Config(method, geometry=geometry).word
    x, w, g_y = torch.randn(2, 32, 9, 9), torch.randn(48, 16, 3, 3), torch.randn(2, 48, 5, 5)
    codes, scale = torch.ops.hotrain.keep(x.permute(0, 2, 3, 1).clone(), draw, words, spec)
    positions = g_y.permute(0, 2, 3, 1).contiguous()
    args = (positions, w, codes, scale, draw, words, spec, "", torch.float32, list(x.shape), [True, True, True])
    torch.library.opcheck(torch.ops.hotrain.conv2d_gradients, args, test_utils=("test_schema", "test_faketensor"))


# --- Kernels, by a stand-in that keeps their format and calls the definition


class StandIn:
    """`hotrain.kernels` as layers know it, on the CPU: codes of P x transposed, rows padded to 16 with zeros."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, AmaxHistory | None]] = []
        self.inputs: list[Tensor] = []
        self.prepared: list[torch.device] = []

    def reason(self, method: Method, lay: Layout, dtype: torch.dtype, device: torch.device) -> str | None:
        return None if method.saved == hotrain.Saved(8, rounding="stochastic") else "not this one"

    def has_fp8(self, device: torch.device) -> bool:
        return False

    def switched_off(self) -> bool:
        return False

    def note(self, why: str, device: torch.device, dtype: torch.dtype) -> None:
        """Warns of nothing here."""

    def prepare(self, device: torch.device) -> None:
        self.prepared.append(device)

    def keep(
        self, x: Tensor, method: Method, lay: Layout, key: Tensor, history: AmaxHistory | None
    ) -> tuple[Tensor, Tensor]:
        self.calls.append(("keep", history))
        self.inputs.append(x)
        codes, scale = autograd.pack(x, key, Config(method), lay, None)
        assert codes is not None
        assert scale is not None
        return F.pad(codes, (0, 0, 0, -codes.shape[0] % 16)).T.contiguous(), scale

    def kept_shapes(self, columns: int, lay: Layout, method: Method, dtype: torch.dtype) -> list[Any]:
        return [((columns, -(-lay.rows // 16) * 16), torch.int8), ((), torch.float32)]

    def gradients(
        self, g_y: Tensor, w: Tensor | None, kept: tuple[Tensor, Tensor], method: Method, lay: Layout, key: Tensor,
        history: AmaxHistory | None, needs: tuple[bool, bool, bool], transposed: bool, dtype: torch.dtype, columns: int,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        self.calls.append(("gradients", history))
        config = Config(method, transposed=transposed)
        return autograd.linear_gradients(g_y, w, self._rows(kept, lay), key, config, lay, None, columns, dtype, needs)

    def conv2d_gradients(
        self, g_y: Tensor, w: Tensor | None, kept: tuple[Tensor, Tensor], method: Method, lay: Layout, key: Tensor,
        history: AmaxHistory | None, needs: tuple[bool, bool, bool], shape: tuple[int, ...], geometry: Geometry,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        self.calls.append(("conv2d_gradients", history))
        config = Config(method, geometry=geometry)
        rows = self._rows(kept, lay)
        return autograd.conv2d_gradients(g_y, w, rows, key, config, lay, None, shape, g_y.dtype, needs)

    @staticmethod
    def _rows(kept: tuple[Tensor, Tensor], lay: Layout) -> tuple[Tensor | None, Tensor | None]:
        return (None, None) if kept[0] is None else (kept[0].T[: lay.rows].contiguous(), kept[1])


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn()
    monkeypatch.setattr(autograd, "KERNELS", dict.fromkeys(("cpu", "cuda"), found))
    return found


def grads(run: Any, *tensors: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(run(*tensors).square().sum(), tensors))


LOW = "hot-unbiased"
CASES = {
    "tokens": (lambda x, w: functional.linear(x, w, key=7, method=LOW), (2, 50, 64), (48, 64)),
    "transposed": (
        lambda x, w: functional.linear(x, w, key=7, transposed=True, method="hot-unbiased"),
        (2, 50, 64),
        (64, 48),
    ),
    "1×1": (lambda x, w: functional.conv2d(x, w, key=7, method=LOW), (2, 64, 6, 6), (48, 64, 1, 1)),
    "patches": (
        lambda x, w: functional.conv2d(x, w, stride=4, key=7, method="hot-unbiased"),
        (2, 3, 16, 16),
        (48, 3, 4, 4),
    ),
    "3×3": (lambda x, w: functional.conv2d(x, w, padding=1, key=7, method=LOW), (2, 32, 6, 6), (48, 32, 3, 3)),
}


@pytest.mark.parametrize(("run", "x", "w"), CASES.values(), ids=CASES.keys())
def test_kernels_take_matrices(
    run: Any, x: tuple[int, ...], w: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linear layers and convolutions; the stand-in's numbers are the definition's."""
    tensors = torch.randn(x, requires_grad=True), torch.randn(w, requires_grad=True)
    want = grads(run, *tensors)
    found = StandIn()
    monkeypatch.setattr(autograd, "KERNELS", dict.fromkeys(("cpu", "cuda"), found))
    got = grads(run, *tensors)
    assert [name for name, _ in found.calls] == ["keep", "conv2d_gradients" if w[2:] == (3, 3) else "gradients"]
    assert found.inputs[0].dim() == 2
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_channels_last_images_are_tokens_without_a_copy(kernels: StandIn) -> None:
    x = torch.randn(2, 64, 6, 6).to(memory_format=torch.channels_last)
    functional.conv2d(x, torch.randn(48, 64, 1, 1, requires_grad=True), method="hot-unbiased", key=7)
    assert kernels.inputs[0].data_ptr() == x.data_ptr()


def test_the_reference_takes_the_rest(kernels: StandIn) -> None:
    """A method that the kernels give a reason against."""
    x, w = torch.randn(2, 50, 64), torch.randn(48, 64, requires_grad=True)
    functional.linear(x, w, method="hq4").sum().backward()
    image, k = torch.randn(2, 32, 6, 6), torch.randn(48, 32, 3, 3, requires_grad=True)
    functional.conv2d(image, k, method="hq4", key=7).sum().backward()
    assert kernels.calls == []


@pytest.mark.parametrize("frozen", ["weight", "input"])
def test_kernels_are_asked_for_what_is_needed(kernels: StandIn, frozen: str) -> None:
    """Nothing is kept for a frozen weight, and w is not kept for an input without gradient."""
    x = torch.randn(2, 50, 64, requires_grad=frozen != "input")
    w = torch.randn(48, 64, requires_grad=frozen != "weight")
    functional.linear(x, w, key=7, method="hot-unbiased").sum().backward()
    assert [name for name, _ in kernels.calls] == (["gradients"] if frozen == "weight" else ["keep", "gradients"])
    assert (x.grad is None, w.grad is None) == (frozen == "input", frozen == "weight")


def test_compiled_layers_reach_the_kernels_with_their_own_history(kernels: StandIn) -> None:
    """Layers share a graph, which is passed the words of each; their address tells whose they are."""
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    hotrain.convert(model, "hot-unbiased")
    x = torch.randn(2, 40, 64, requires_grad=True)
    states = [state for _, _, state in hotrain.converted_layers(model)]
    found = []
    torch._dynamo.reset()
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        hotrain.manual_seed(1)
        for _ in range(2):
            model.zero_grad()
            kernels.calls.clear()
            run(x).square().mean().backward()
            histories = [state.draws.history for state in states]
            assert [name for name, _ in kernels.calls] == ["keep", "keep", "gradients", "gradients"]
            assert [history for _, history in kernels.calls] == [*histories, *reversed(histories)]
        found.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)
    assert draws.layer_of(torch.zeros(())) is None  # a copy of the words, or anything else, is nobody's


def test_layers_are_made_ready_before_they_are_traced(kernels: StandIn) -> None:
    """Allocation happens when a graph is traced, outside of it, once a layer."""
    model = nn.Linear(64, 64)
    hotrain.convert(model, "hot-unbiased")
    (state,) = (state for _, _, state in hotrain.converted_layers(model))
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 40, 64)
    run(x).sum().backward()
    history, prepared = state.draws.history, list(kernels.prepared)
    assert history is not None
    run(x).sum().backward()
    assert state.draws.history is history
    assert kernels.prepared == prepared
    assert prepared


def test_on_the_cpu_no_kernels_are_looked_for() -> None:
    assert set(autograd.KERNELS) == {"cuda"}


def test_what_the_host_knows_of_a_device_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a layer has a tensor; as long as no graph moves it, the host knows its value without waiting."""
    monkeypatch.setattr(draws._seed, "graphs", False)
    owner, key, _ = layer()
    assert owner.host_key() == autograd.reference_key(key)
    monkeypatch.setattr(draws._seed, "graphs", True)
    assert owner.host_key() is None


BUILDS = {"linear": lambda: nn.Linear(32, 48), "conv2d": lambda: nn.Conv2d(32, 48, 3, padding=1)}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS.keys())
@pytest.mark.parametrize("name", [n for n in hotrain.presets() if hotrain.preset(n).draws])
def test_no_reference_reads_its_key(name: str, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph cannot be captured where the host reads a tensor: every draw must come from the key's device."""
    torch.manual_seed(0)
    exact = build()
    x = torch.randn(2, 32, 16, 16)
    x = x if isinstance(exact, nn.Conv2d) else x.flatten(2).mT.contiguous()

    def gradients() -> list[Tensor]:
        hotrain.manual_seed(5)
        model = nn.Sequential(copy.deepcopy(exact))
        hotrain.convert(model, name, filter_fn=lambda *_: True, plan="memory")
        inputs = x.clone().requires_grad_()
        y = model(inputs)
        y.backward(torch.cos(torch.arange(y.numel()).float()).view(y.shape) + 0.1)
        return [inputs.grad, *(p.grad for p in model.parameters())]

    want, found = gradients(), []
    monkeypatch.setattr(autograd, "reference_key", lambda key: found.append(key) or of_device(key))
    got = gradients()
    assert found
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def of_device(key: Any) -> draws.DeviceKey:
    return draws.DeviceKey(torch.tensor(draws.signed(0 if key is None else int(key))))

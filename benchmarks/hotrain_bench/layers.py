"""`hotrain bench layers`: backward of single Linear layers, with the quantized save at forward, against cuBLAS.

The baseline is the two products of plain tensors in bf16, ``g_y @ w`` and ``g_yᵀ @ x``: what autograd runs for an exact
layer, without autograd's overhead. A method's time includes everything it does for the same gradients: projecting and
quantizing x at forward, the weight's transform, the passes over g_y and both products. Every gradient is checked before
anything is timed.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotrain import backward
from hotrain.draws import mix
from hotrain.layer_record import AmaxHistory
from hotrain.method import Method
from hotrain.presets import preset
from hotrain.quantize.integer import wide
from hotrain.saved import Format, Kept
from hotrain.train import parse_method
from hotrain.transform.tokens import Grid, Layout, layout, project
from hotrain_bench import timing
from hotrain_bench.conditions import Clocks

MODELS = ("vit_b", "llama")
BASELINE = "bf16"
AGREEMENT = 0.02  # largest relative difference of kernels and reference: bf16's rounding, and codes at a boundary
_BF16 = 0.01  # bound on the relative error of a bf16 product against float64
# Relative error of one quantized operand of white noise. Integers: the largest of 10³ to 10⁸ normal numbers is 3.5 to 6
# standard deviations, the step is that over the largest code, the error step/√6 (stochastic). e4m3 0.03, e5m2 0.05.
_OPERAND = {None: 0.0, 4: 0.36, 8: 0.04}


class Wrong(RuntimeError):
    """A gradient is further from the exact one than its method allows, so nothing is timed."""


@dataclass(frozen=True)
class Shape:
    """A Linear layer and its tokens.

    Args:
        subject: name in the records.
        lead: dimensions of x before the features: (batch, tokens).
        outputs, inputs: features.
        grid: the tokens' grid, where they are patches of an image.
        old: also measure fp32 and TF32, the papers' baselines.
    """

    subject: str
    lead: tuple[int, ...]
    outputs: int
    inputs: int
    grid: Grid | None = None
    old: bool = False

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return math.prod(self.lead)

    @property
    def nbytes(self) -> int:
        """Bytes of one set of bf16 inputs."""
        return 2 * (self.tokens * (self.inputs + self.outputs) + self.inputs * self.outputs)

    def layout(self, method: Method) -> Layout:
        """Return the method's tiles of the tokens."""
        rows, across = method.grad_weight, method.grad_input.transform != "lowpass"
        return layout(self.lead, rows.tile, rows.rank, rows.sampled, rows.order, self.grid, across)


def shapes(models: Sequence[str], batch: int = 128, tiny: bool = False) -> list[Shape]:
    """Return the layers of ViT-B at 224 px (14×14 patches and a class token) and of Llama-3-8B at 8192 tokens.

    Args:
        models: names from `MODELS`.
        batch: images of the ViT-B layers.
        tiny: the same list with widths of 32 to 96 and few tokens.

    Raises:
        ValueError: an unknown model.
    """
    found = []
    for model in models:
        if model == "vit_b":
            grid, images = (Grid(4, 4, prefix=1), 2) if tiny else (Grid(14, 14, prefix=1), batch)
            wide = 32 if tiny else 768
            sizes = {"qkv": (3, 1), "proj": (1, 1), "fc1": (4, 1), "fc2": (1, 4)}
            found += [
                Shape(f"vit_b/{name}/b{images}", (images, grid.tokens), o * wide, i * wide, grid, old=True)
                for name, (o, i) in sizes.items()
            ]
        elif model == "llama":
            lead = (2, 32) if tiny else (4, 2048)
            widths = {"q": (4096, 4096), "up": (14336, 4096), "down": (4096, 14336)}
            found += [
                Shape(f"llama8b/{name}/t{math.prod(lead)}", lead, o // (128 if tiny else 1), i // (128 if tiny else 1))
                for name, (o, i) in widths.items()
            ]
        else:
            raise ValueError(f"--models: got {model!r}, accepted are {', '.join(MODELS)}")
    return found


@dataclass(frozen=True)
class Inputs:
    """White noise for one layer: x (T, I), g_y (T, O) and w (O, I)."""

    x: Tensor
    g_y: Tensor
    w: Tensor

    @classmethod
    def of(cls, shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Inputs:
        """Draw inputs of a shape."""

        def noise(rows: int, columns: int, size: float) -> Tensor:
            return torch.randn(rows, columns, device=device).mul_(size).to(dtype)

        t, o, i = shape.tokens, shape.outputs, shape.inputs
        # Magnitudes as in training: weights of variance 1/I, gradients far below 1.
        return cls(noise(t, i, 1.0), noise(t, o, 1e-4), noise(o, i, i**-0.5))

    def to(self, dtype: torch.dtype) -> Inputs:
        """Convert all three to a dtype."""
        return Inputs(self.x.to(dtype), self.g_y.to(dtype), self.w.to(dtype))


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
Needs = tuple[bool, bool, bool]


def products(s: Inputs, bias: bool = False) -> Gradients:
    """Compute the exact gradients with PyTorch's products in the dtype of the inputs.

    Args:
        s: inputs of the layer.
        bias: also the bias' gradient.

    Returns:
        g_x (T, I), g_w (O, I), and g_b (O,) or None.
    """
    return s.g_y @ s.w, s.g_y.T @ s.x, s.g_y.sum(0) if bias else None


def products_at(precision: str) -> Callable[[Inputs], Gradients]:
    """Return `products` of float32 inputs at a matmul precision: fp32 (``"highest"``) or TF32 (``"high"``)."""

    def run(s: Inputs) -> Gradients:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        try:
            return products(s)
        finally:
            torch.set_float32_matmul_precision(before)

    return run


class Definition:
    """The reference: a method's pack and gradients by `hotrain.backward`.

    Args:
        shape: the layer.
        method: the method.
        key: seed of the random numbers.
    """

    def __init__(self, shape: Shape, method: Method, key: int) -> None:
        self.method, self.lay, self.key, self.lead = method, shape.layout(method), key, shape.lead

    def keep(self, s: Inputs) -> tuple[Tensor, ...]:
        """Project and pack x, as at forward."""
        whole = s.x if self.method.saved.bits is None else wide(s.x)
        rows = project(whole.view(*self.lead, -1), self.lay, self.key)
        return self._format(s).keep(rows, self.key)

    def restored(self, s: Inputs, saved: tuple[Tensor, ...]) -> Kept:
        """Unpack P x, (R, I), from what `keep` returned."""
        return self._format(s).restore(saved)

    def _format(self, s: Inputs) -> Format:
        return Format(self.method.saved, s.x.shape[1], s.x.dtype)

    def grad_codes(self, s: Inputs, saved: tuple[Tensor, ...], needs: Needs = (True, True, False)) -> object:
        """Compute both quantities made from g_y: transformed for g_x, projected for g_w."""
        path, g = self.method.grad_input, wide(s.g_y)
        rotated = None if path.bits is None else backward.rotated_grad(g, path, self.key)
        return rotated, project(g.view(*self.lead, -1), self.lay, self.key)

    def weight_codes(self, s: Inputs) -> object:
        """Transform and quantize w; None if the method does not quantize it."""
        path = self.method.grad_input
        return None if path.bits is None else backward.rotated_weight(wide(s.w), path, self.key)

    def gradients(self, s: Inputs, saved: tuple[Tensor, ...], needs: Needs = (True, True, False)) -> Gradients:
        """Compute the gradients (g_x, g_w, g_b) that ``needs`` asks for; None for the others."""
        kept = self.restored(s, saved)
        g_x = backward.grad_input(s.g_y, s.w, self.method, self.key, self.lay) if needs[0] else None
        g_y = s.g_y.view(*self.lead, -1)
        g_w = backward.grad_weight(g_y, kept, self.lay, self.method, self.key) if needs[1] else None
        return g_x, g_w, s.g_y.sum(0) if needs[2] else None


class Kernels:
    """The same by `hotrain.kernels`.

    Args:
        shape: the layer.
        method: the method.
        key: seed of the random numbers.
        device: the GPU.

    Raises:
        ValueError: the kernels do not support the method; the message says why.
    """

    def __init__(self, shape: Shape, method: Method, key: int, device: torch.device) -> None:
        self.kernels: Any = importlib.import_module("hotrain.kernels")
        self.method, self.lay = method, shape.layout(method)
        reason = self.kernels.reason(method, self.lay, torch.bfloat16, device)
        if reason is not None:
            raise ValueError(f"{shape.subject}: no kernels for {method}: {reason}")
        self.key = torch.tensor(key - (key >> 63 << 64), dtype=torch.int64, device=device)
        self.history = AmaxHistory.on(device)

    def keep(self, s: Inputs) -> tuple[Tensor, ...]:
        """Project and pack x, as at forward."""
        codes, side = self.kernels.keep(s.x, self.method, self.lay, self.key, self.history)
        return codes, side

    def grad_codes(self, s: Inputs, saved: tuple[Tensor, ...], needs: Needs = (True, True, False)) -> object:
        """Quantize g_y for both gradients."""
        return self.kernels.grad_codes(s.g_y, saved, self.method, self.lay, self.key, self.history, needs)

    def weight_codes(self, s: Inputs) -> object:
        """Transform and quantize w."""
        return self.kernels.weight_codes(s.w, self.method, self.key, self.history)

    def gradients(self, s: Inputs, saved: tuple[Tensor, ...], needs: Needs = (True, True, False)) -> Gradients:
        """Compute the gradients (g_x, g_w, g_b) that ``needs`` asks for; None for the others."""
        found: Gradients = self.kernels.gradients(
            s.g_y, s.w, saved, self.method, self.lay, self.key, self.history, needs
        )
        return found


Path = Definition | Kernels
KEY = mix(2026, 11, 21)


def path_of(shape: Shape, method: Method, device: torch.device) -> Path:
    """Return the implementation of a method on a device: kernels on a GPU, the reference elsewhere."""
    return Kernels(shape, method, KEY, device) if device.type == "cuda" else Definition(shape, method, KEY)


def relative(found: Tensor, truth: Tensor) -> float:
    """Return ‖found − truth‖ / ‖truth‖; NaN where `found` is not finite."""
    return ((found.double() - truth.double()).norm() / truth.double().norm()).item()


def bounds(method: Method) -> tuple[float, float]:
    """Return bounds on the relative errors of (g_x, g_w) of a correct method on white noise.

    They are the rounding of both operands and, for g_w, the rows that are left out: √(1 − r/t) of the energy for a
    fixed low-pass; √(m/t · (m/s − 1)) with s of m rows drawn and scaled by m/s; √drop for dropped entries.
    """
    g_x, g_w, saved = method.grad_input, method.grad_weight, method.saved
    if g_w.sampled:
        left = g_w.tile - g_w.fixed
        lost = math.sqrt(left / g_w.tile * (left / g_w.sampled - 1))
    else:
        lost = math.sqrt(1 - g_w.rank / g_w.tile)
    lost = math.hypot(lost, math.sqrt(g_w.drop))
    across = lost if g_x.transform == "lowpass" else 0.0
    first = math.hypot(across, _OPERAND[g_x.bits], _OPERAND[g_x.bits])
    # The scaling of drawn rows by m/s scales their rounding error too.
    second = math.hypot(lost, math.hypot(1.0, lost) * math.hypot(_OPERAND[g_w.bits], _OPERAND[saved.bits]))
    return 1.1 * first + _BF16, 1.1 * second + _BF16


def check(shape: Shape, label: str, method: Method, device: torch.device) -> dict[str, float]:
    """Check one method's gradients.

    Args:
        shape: the layer.
        label: the method's name, for messages.
        method: the method.
        device: the device to compute on.

    Returns:
        Relative errors against the exact gradients (in float64) and, for kernels, against the reference.

    Raises:
        Wrong: g_x or g_w is further from the exact gradient than `bounds`, g_b than bf16's rounding, or a kernel's
            gradient from the reference with the same key than `AGREEMENT`.
    """
    s = Inputs.of(shape, device)
    path = path_of(shape, method, device)
    found = path.gradients(s, path.keep(s), (True, True, True))
    whole = s.to(torch.float64)
    truth = products(whole, bias=True)
    del whole
    errors = {}
    for name, got, want, bound in zip(("g_x", "g_w", "g_b"), found, truth, (*bounds(method), _BF16), strict=True):
        assert got is not None
        assert want is not None
        errors[name] = relative(got, want)
        if not errors[name] <= bound:
            raise Wrong(
                f"{shape.subject} {label}: {name} is off by {errors[name]:.3f}, allowed is {bound:.3f}; no times"
            )
    if isinstance(path, Kernels):
        definition = Definition(shape, method, KEY)
        wanted = definition.gradients(s, definition.keep(s))
        for name, got, want in zip(("g_x", "g_w"), found, wanted, strict=False):
            assert got is not None
            assert want is not None
            apart = errors[f"{name}_to_definition"] = relative(got, want)
            if not apart <= AGREEMENT:
                raise Wrong(
                    f"{shape.subject} {label}: {name} of the kernels is {apart:.4f} away from the reference, "
                    f"allowed is {AGREEMENT}; no times"
                )
    return errors


@dataclass(frozen=True)
class Variant:
    """A computation to time.

    Args:
        name: name in the records.
        role: ``baseline``, ``method`` (everything) or ``part`` (of the method named before the slash).
        run: computes on one set of inputs.
        path: class of the implementation.
        bias: whether the bias' gradient is included.
        kept: bytes saved between forward and backward.
        dtype: dtype of the inputs.
    """

    name: str
    role: str
    run: Callable[[Inputs], object]
    path: str = "products"
    bias: bool = False
    kept: int | None = None
    dtype: torch.dtype = torch.bfloat16


def parts(path: Path, label: str, kept: Mapping[int, tuple[Tensor, ...]]) -> list[Variant]:
    """Return the parts of a method as variants.

    Args:
        path: the implementation.
        label: the method's name.
        kept: what `keep` returned for each set of inputs, by `id` of the set.
    """

    def gradients(*needs: bool) -> Callable[[Inputs], object]:
        x, w, b = needs
        return lambda s: path.gradients(s, kept[id(s)], (x, w, b))

    pieces: dict[str, Callable[[Inputs], object]] = {
        "keep": path.keep,
        "g_y": lambda s: path.grad_codes(s, kept[id(s)]),
        "w": path.weight_codes,
        "g_x": gradients(True, False, False),
        "g_w": gradients(False, True, False),
        "g_x and g_w": gradients(True, True, False),
    }
    return [Variant(f"{label}/{name}", "part", run, type(path).__name__) for name, run in pieces.items()]


def variants_of(
    shape: Shape, methods: Mapping[str, Method], sets: Sequence[Inputs], device: torch.device
) -> list[Variant]:
    """Return all variants of one layer: baselines, methods and their parts."""
    x = sets[0].x.nbytes
    found = [
        Variant(BASELINE, "baseline", products, kept=x),
        Variant(f"{BASELINE} with bias", "baseline", lambda s: products(s, bias=True), bias=True, kept=x),
    ]
    if shape.old:
        for name, precision in (("fp32", "highest"), ("tf32", "high")):
            found.append(Variant(name, "baseline", products_at(precision), kept=2 * x, dtype=torch.float32))
    for label, method in methods.items():
        path = path_of(shape, method, device)
        kept = {id(s): path.keep(s) for s in sets}
        nbytes = sum(t.nbytes for t in kept[id(sets[0])])

        def everything(s: Inputs, bias: bool, path: Path = path) -> Gradients:
            return path.gradients(s, path.keep(s), (True, True, bias))

        name = type(path).__name__
        found.append(Variant(label, "method", functools.partial(everything, bias=False), name, kept=nbytes))
        with_bias = functools.partial(everything, bias=True)
        found.append(Variant(f"{label} with bias", "method", with_bias, name, bias=True, kept=nbytes))
        found += parts(path, label, kept)
    return found


def measure(
    shape: Shape, methods: Mapping[str, Method], device: torch.device, repeats: int, clock: timing.Clock | None = None
) -> list[dict[str, Any]]:
    """Time all variants of one layer, interleaved.

    Args:
        shape: the layer.
        methods: methods by name.
        device: the device to measure on.
        repeats: rounds in which every variant runs once.
        clock: overrides the device's clock.

    Returns:
        One record per variant. ``median_ms`` is per set of inputs, of a CUDA graph over all sets; ``eager_ms`` of the
        same calls from the host. On a CPU both are wall-clock times.
    """
    clock = clock or timing.clock_of(device)
    sets = [Inputs.of(shape, device) for _ in range(timing.sets_past_cache(shape.nbytes, device))]
    variants = variants_of(shape, methods, sets, device)
    inputs = {torch.bfloat16: sets, torch.float32: [s.to(torch.float32) for s in sets if shape.old]}
    works = {variant.name: timing.over(inputs[variant.dtype], variant.run) for variant in variants}
    eager = timing.interleaved(works, repeats, clock, len(sets))
    on_gpu = device.type == "cuda"
    graphs = {name: timing.in_graph(work) for name, work in works.items()} if on_gpu else works
    asked: list[Clocks] = []
    graph = timing.interleaved(graphs, repeats, clock, len(sets), halfway=lambda: asked.append(Clocks(device)))
    common = {
        "bench": "layers",
        "subject": shape.subject,
        "shape": [shape.tokens, shape.outputs, shape.inputs],
        "repeats": repeats,
        "input_sets": len(sets),
        "timed": "cuda graph" if on_gpu else "wall clock",
        "clocks": asked[0].read(),
    }
    return [
        {
            **common,
            "variant": variant.name,
            "role": variant.role,
            "path": variant.path,
            "bias": variant.bias,
            "median_ms": graph[variant.name].median_ms,
            "spread_ms": graph[variant.name].spread_ms,
            "eager_ms": eager[variant.name].median_ms,
            "eager_spread_ms": eager[variant.name].spread_ms,
            "peak_bytes": None,
            "activation_bytes": variant.kept,
        }
        for variant in variants
    ]


def as_methods(texts: Sequence[str]) -> dict[str, Method]:
    """Parse methods such as ``"hot:rank=4"``.

    Returns:
        The methods by these texts.

    Raises:
        ValueError: the exact method, or an unknown one.
    """
    found = {}
    for text in texts:
        name, overrides = parse_method(text)
        found[text] = preset(name, **overrides)
        if found[text].is_exact:
            raise ValueError(f"--methods: {text!r} is the baseline, it is measured anyway")
    return found


def run(
    models: Sequence[str], batch: int, methods: Sequence[str], device: torch.device, repeats: int, tiny: bool = False
) -> Iterator[dict[str, Any]]:
    """Check every layer's gradients, then time the layers.

    Args:
        models: names from `MODELS`.
        batch: images of the ViT-B layers.
        methods: methods as on the command line.
        device: the device to measure on.
        repeats: rounds in which every variant runs once.
        tiny: small shapes, to test the code.

    Yields:
        One record per variant of a layer.

    Raises:
        Wrong: a gradient is wrong; before anything is timed.
        ValueError: an unknown model or method.
    """
    chosen, todo = as_methods(methods), shapes(models, batch, tiny)
    torch.manual_seed(0)
    errors: dict[tuple[str, str], dict[str, float]] = {}
    for shape in todo:
        for label, method in chosen.items():
            errors[shape.subject, label] = check(shape, label, method, device)
    for shape in todo:
        for row in measure(shape, chosen, device, repeats):
            yield row | {"tiny": tiny, "errors": errors.get((shape.subject, row["variant"]))}
        if device.type == "cuda":
            torch.cuda.empty_cache()

"""Gradient errors of activation formats, for every operator of `hotrain.compress`, on trained models.

    python benchmarks/formats.py --data cifar10.npz [--models small_vit,small_resnet18] [--out FILE]

Each model is trained for `--steps` updates in float32. Then, over `--batches` batches that it has not seen:

* every call of an operator is replayed with its arguments and its output gradient, once exactly and once with each
  format: the error of that operator's own gradients;
* the gradient of the whole model is computed with that operator's saved tensors in that format and all else exact;
* the same with sets of formats for all operators at once, and with the methods of layers, for comparison.

Errors are relative to the size of the exact gradient: ``error`` of one call or batch (root mean square), ``persistent``
the part that averaging does not remove: over a gradient's rows for that of an activation, over batches for that of a
parameter (and for the whole model's). ``noise`` is the mini-batch noise: gradients of two batches differ by it.
"""

from __future__ import annotations

import contextlib
import copy
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hotrain_bench.conditions import conditions, parser_of, write
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import hotrain
from hotrain.compress import formats as policy
from hotrain.compress.interpose import Compressed
from hotrain.compress.report import Buffers
from hotrain.compress.slopes import ACTIVATIONS
from hotrain.saved import Grouped, Levels
from hotrain.train.data import ArrayData, load_data
from hotrain.train.models import create_model

EXACT = dict.fromkeys(policy.FORMATS, "exact")
MULTIPLICATIONS = (torch.mul, Tensor.mul, Tensor.__mul__)

# ---- formats: those of the policy, and candidates that exist only in this file ----


class Exact:
    """The exact tensor, with the interface of a format of codes and scale."""

    def keep(self, t: Tensor, least: float | None = None) -> tuple[Tensor, Tensor]:
        return t, t.new_empty(0)

    def restore(self, kept: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return kept[0]


class Either:
    """Two formats in alternation: for v and the output of attention, which share an entry of the policy."""

    def __init__(self, *formats: Grouped | Exact) -> None:
        self.formats, self.kept, self.restored = formats, 0, 0

    def keep(self, t: Tensor, least: float | None = None) -> tuple[Tensor, ...]:
        self.kept += 1
        return self.formats[(self.kept - 1) % 2].keep(t, least)

    def restore(self, kept: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self.restored += 1
        return self.formats[(self.restored - 1) % 2].restore(kept, shape, dtype)


@dataclass
class Of:
    """A function of values that are packed in `form`: f'(x) or f(x) from codes of x."""

    f: Callable[[Tensor], Tensor]
    form: Grouped
    x: Tensor | None = None  # packed instead of the argument of `keep`

    def keep(self, t: Tensor, slope: Any = None) -> tuple[Tensor, ...]:
        return self.form.keep(t if self.x is None else self.x)

    def restore(self, kept: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.f(self.form.restore(kept, shape, torch.float32)).to(dtype)

    def nbytes(self, shape: Sequence[int]) -> int:
        return self.form.nbytes(shape)


class Redrawn:
    """`form` with its dither thresholds shifted by some rows at every gradient: drawn again in every step."""

    step = 0

    def __init__(self, form: Grouped) -> None:
        self.form = form

    def keep(self, t: Tensor, least: float | None = None) -> tuple[Tensor, Tensor]:
        return self.form.keep(t.reshape(-1, t.shape[-1]).roll(9973 * Redrawn.step, 0), least)

    def restore(self, kept: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        flat = (math.prod(shape[:-1]), shape[-1])
        return self.form.restore(kept, flat, dtype).roll(-9973 * Redrawn.step, 0).reshape(tuple(shape))

    def nbytes(self, shape: Sequence[int]) -> int:
        return self.form.nbytes(shape)


VALUES: dict[str, Any] = {
    "int8": Grouped(8),
    "int4": Grouped(4, dithered=True),
    "int4 nearest": Grouped(4),
    "int4 redrawn": Redrawn(Grouped(4, dithered=True)),
    "int3": Grouped(3, dithered=True),
    "int2": Grouped(2, dithered=True),
}
EVERYWHERE = tuple(VALUES)
VALUES |= {
    "int4/row": Grouped(4, dithered=True, whole=True),
    "int4 nearest/row": Grouped(4, whole=True),
    "int2/row": Grouped(2, dithered=True, whole=True),
    "int6": Grouped(6),
    "log8/row": policy.GROUPED["log8/row"],
}
OF_NORMS = (*EVERYWHERE, "int4/row", "int4 nearest/row", "int2/row")
OF_HEADS = ("int8", "int6", "int4", "int4 nearest", "int3", "int2")
SLOPES: dict[str, Levels | Grouped] = {
    "slope 4 bits": policy.SLOPES,
    "slope 3 bits": Levels(3, first=-1, per_one=5),
    "slope 2 bits, -1 to 2": Levels(2, first=-1, per_one=1),
    "slope 2 bits, 0 to 1": Levels(2, first=0, per_one=3),
    "input int8": VALUES["int8"],
    "input int4": VALUES["int4"],
    "input int4 nearest": VALUES["int4 nearest"],
    "input int3": VALUES["int3"],
}
DERIVED = Of(F.gelu, VALUES["int4"])
policy.GROUPED.update(VALUES)
policy.GROUPED["exact"] = Exact()  # type: ignore[assignment]
policy.GROUPED["derived"] = DERIVED  # type: ignore[assignment]

# ---- operators ----


@dataclass(frozen=True)
class Operator:
    """One row of the table: the operator's functions, its entry of the policy, the arguments with gradients."""

    name: str
    functions: tuple[Any, ...]
    entry: str
    gradients: dict[int | str, str]  # position or keyword → name
    channels: int = -1  # channel axis of the argument
    formats: tuple[str, ...] = EVERYWHERE


_NORM: dict[str, Any] = {"entry": "norm", "gradients": {0: "g_x", "weight": "g_w"}, "formats": OF_NORMS}
_SLOPE: dict[str, Any] = {"entry": "slope", "gradients": {0: "g_x"}, "formats": tuple(SLOPES)}
_ATTENTION = (F.scaled_dot_product_attention,)
_QKV: dict[int | str, str] = {0: "g_q", 1: "g_k", 2: "g_v"}
ATTENTION_OUTPUT = ("exact / int8", "exact / int4", "int4 / exact", "exact / int2")
OPERATORS = (
    Operator("gelu", (F.gelu,), **_SLOPE),
    Operator("silu", (F.silu,), **_SLOPE),
    Operator("layer_norm", (F.layer_norm,), **_NORM),
    Operator("rms_norm", (F.rms_norm,), **_NORM),
    Operator("group_norm", (F.group_norm,), **_NORM, channels=1),
    Operator("batch_norm", (F.batch_norm,), **_NORM, channels=1),
    Operator(
        "softmax", (F.softmax, torch.softmax, Tensor.softmax), "softmax", {0: "g_x"}, formats=(*EVERYWHERE, "log8/row")
    ),
    Operator("attention q, k", _ATTENTION, "query_key", _QKV, formats=OF_HEADS),
    Operator(
        "attention v, output",
        _ATTENTION,
        "value_output",
        _QKV,
        formats=(*OF_HEADS, *ATTENTION_OUTPUT),
    ),
    Operator("product", MULTIPLICATIONS, "product", {0: "g_a", 1: "g_b"}),
    Operator("linear", (F.linear,), "linear", {1: "g_w"}),
    Operator("conv2d", (F.conv2d,), "conv", {1: "g_w"}, channels=1),
)
for _name in ATTENTION_OUTPUT:
    policy.GROUPED[_name] = Either(*(policy.GROUPED[part] for part in _name.split(" / ")))  # type: ignore[assignment]


@contextlib.contextmanager
def chosen(formats: Mapping[str, str]) -> Iterator[None]:
    """Context: the policy with these formats, all other entries exact; ``slope``: derivative of GELU and SiLU."""
    before, slopes = dict(policy.FORMATS), dict(ACTIVATIONS)
    policy.FORMATS.update(EXACT | {name: form for name, form in formats.items() if name != "slope"})
    for name in ("gelu", "silu"):
        form, kind = SLOPES[formats.get("slope", "slope 4 bits")], slopes[name]
        # Formats that are not of derivatives pack x, and backward computes the derivative.
        levels: Any = form if isinstance(form, Levels) else Of(kind.slope, form)
        ACTIVATIONS[name] = replace(kind, levels=levels, by_input=False)
    try:
        yield
    finally:
        policy.FORMATS.update(before)
        ACTIVATIONS.update(slopes)


class Only(Compressed):
    """The compressing mode for some functions; the others run exactly."""

    def __init__(self, wanted: Iterable[Any]) -> None:
        super().__init__(Buffers())
        self.wanted = frozenset(wanted)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in self.wanted:
            return super().__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


class BehindGelu(Only):
    """The linear layer after a GELU recomputes its input from codes of the GELU's input; all else is exact."""

    def __init__(self) -> None:
        super().__init__([F.linear])
        self.x: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.gelu:
            self.x = args[0].detach()
        elif func is F.linear and self.x is not None:
            DERIVED.x, self.x = self.x, None
            return super().__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


# ---- errors ----


@dataclass
class Tally:
    """Sums over units (rows of a gradient, calls, batches) for relative errors."""

    units: int = 0
    error_sum: Tensor | float = 0.0
    exact_sum: Tensor | float = 0.0
    error_squares: float = 0.0
    exact_squares: float = 0.0
    products: float = 0.0

    def add(self, exact: Tensor, found: Tensor) -> None:
        """Add units.

        Args:
            exact: exact gradients, (units, entries).
            found: the same gradients with a format.
        """
        error = found - exact
        self.units += len(exact)
        self.error_sum = self.error_sum + error.double().sum(0)
        self.exact_sum = self.exact_sum + exact.double().sum(0)
        self.error_squares += error.double().square().sum().item()
        self.exact_squares += exact.double().square().sum().item()
        self.products += (error.double() * exact.double()).sum().item()


@dataclass(frozen=True)
class Errors:
    """Relative errors of a gradient."""

    error: float
    persistent: float | None  # None where there is one unit only
    scale: float
    cosine: float
    noise: float | None

    @classmethod
    def of(cls, tallies: Sequence[Tally]) -> Errors:
        """Errors of one gradient in several parts with the same number of units."""
        units = tallies[0].units
        squares = sum(t.exact_squares for t in tallies)
        errors = sum(t.error_squares for t in tallies)
        products = sum(t.products for t in tallies)
        persistent = noise = None
        if units > 1:
            # The mean inner product of two different units: the part that averaging does not remove.
            apart = sum(float(torch.as_tensor(t.error_sum).square().sum()) for t in tallies) - errors
            persistent = math.sqrt(max(0.0, apart / (units - 1)) / squares)
            apart = sum(float(torch.as_tensor(t.exact_sum).square().sum()) for t in tallies) - squares
            noise = math.sqrt(max(0.0, 1 - apart / (units - 1) / squares))
        found = squares + 2 * products + errors
        return cls(
            error=math.sqrt(errors / squares),
            persistent=persistent,
            scale=products / squares,
            cosine=(squares + products) / math.sqrt(squares * found),
            noise=noise,
        )

    def row(self) -> dict[str, float | None]:
        """Return the errors with four digits, for the record."""
        return {name: None if value is None else float(f"{value:.4g}") for name, value in vars(self).items()}


# ---- an operator by itself ----


@dataclass
class Call:
    """A call of an operator, and the gradient of its output."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    g_y: Tensor | None = None


class Recorder(TorchFunctionMode):
    """Records every call of an operator, and the gradient of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.wanted = {func for operator in OPERATORS for func in operator.functions}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        y = func(*args, **kwargs)
        if func in self.wanted and isinstance(y, Tensor) and y.requires_grad:
            # Copies, because a later in-place ReLU may overwrite the arguments.
            call = Call(func, tuple(_copied(a) for a in args), {k: _copied(a) for k, a in kwargs.items()})
            y.register_hook(lambda g, call=call: setattr(call, "g_y", g.detach().clone()))
            self.calls.append(call)
        return y


def _copied(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def replayed(call: Call, gradients: Mapping[int | str, str], compressed: bool) -> dict[str, Tensor] | None:
    """Return the gradients of the call's arguments; None where the mode does not support the call."""
    args, kwargs = [_copied(a) for a in call.args], {k: _copied(a) for k, a in call.kwargs.items()}
    with Only([call.func] if compressed else []) as only:
        y = call.func(*args, **kwargs)
    if compressed and not only.buffers.formats:
        return None
    found = {name: args[i] if isinstance(i, int) else kwargs.get(i) for i, name in gradients.items()}
    wanted = {name: t for name, t in found.items() if isinstance(t, Tensor) and t.requires_grad}
    return dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), call.g_y), strict=True))


def _units(name: str, g: Tensor, channels: int) -> Tensor:
    """Reshape to (units, entries): rows of an activation's gradient; a parameter's is one unit."""
    return g.reshape(1, -1) if name == "g_w" else g.movedim(channels, -1).reshape(-1, g.shape[channels])


def by_operator(calls_of: Iterator[list[Call]], only: str = "") -> dict[tuple[str, str], dict[str, Any]]:
    """Replay the recorded calls with every format.

    Args:
        calls_of: the calls of each batch.
        only: a part of operators' names: only these.

    Returns:
        By (operator, format): bytes per element, and errors of its gradients (root mean square over its calls).
    """
    tallies: dict[tuple[str, str], dict[tuple[str, int], Tally]] = {}
    sizes: dict[tuple[str, str], list[int]] = {}
    for calls in calls_of:
        for operator in (operator for operator in OPERATORS if only in operator.name):
            mine = [call for call in calls if call.func in operator.functions and call.g_y is not None]
            for place, call in enumerate(mine):
                exact = replayed(call, operator.gradients, compressed=False)
                assert exact is not None
                for form in operator.formats:
                    with chosen({operator.entry: form}):
                        found = replayed(call, operator.gradients, compressed=True)
                    if found is None:
                        continue
                    each = tallies.setdefault((operator.name, form), {})
                    for name, g in found.items():
                        g_exact = exact[name]
                        if g_exact.norm() > 0:
                            pair = (_units(name, t, operator.channels) for t in (g_exact, g))
                            each.setdefault((name, place), Tally()).add(*pair)
                    sizes[operator.name, form] = _bytes(operator, form, call.args[0])
    return {
        key: {"bytes_entry": sizes[key][0] / sizes[key][1], "gradients": _over_places(each)}
        for key, each in tallies.items()
    }


def _bytes(operator: Operator, form: str, x: Tensor) -> list[int]:
    shape = x.movedim(operator.channels, -1).shape
    kept = [VALUES.get(name) or SLOPES.get(name) for name in form.split(" / ")]
    return [
        sum(4 * shape.numel() if one is None else one.nbytes(shape) for one in kept),
        len(kept) * shape.numel(),
    ]


def _over_places(tallies: Mapping[tuple[str, int], Tally]) -> dict[str, dict[str, float | None]]:
    rows: dict[str, dict[str, float | None]] = {}
    for name in dict.fromkeys(name for name, _ in tallies):
        errors = [Errors.of([tally]) for (other, _), tally in tallies.items() if other == name]
        rows[name] = {
            field_name: _root_mean_square([vars(e)[field_name] for e in errors])
            for field_name in ("error", "persistent")
        }
    return rows


def _root_mean_square(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(f"{math.sqrt(statistics.fmean(v * v for v in known)):.4g}") if known else None


# ---- the whole model ----


@dataclass
class Model:
    """A trained model, and batches that it has not seen with their exact gradients."""

    name: str
    module: nn.Module
    batches: list[tuple[Tensor, Tensor]]
    exact: list[list[Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.exact = [gradients(self.module, batch) for batch in self.batches]

    def errors(self, within: Callable[[], Any] | None = None, module: nn.Module | None = None) -> dict[str, Any]:
        """Return errors of the gradient of all parameters, and the median and worst of the weight tensors."""
        tallies = [Tally() for _ in self.exact[0]]
        for batch, exact in zip(self.batches, self.exact, strict=True):
            with within() if within is not None else contextlib.nullcontext():
                found = gradients(module or self.module, batch)
            for tally, g_exact, g in zip(tallies, exact, found, strict=True):
                tally.add(g_exact.reshape(1, -1), g.reshape(1, -1))
        each = [
            Errors.of([tally]).error for tally, g in zip(tallies, self.exact[0], strict=True) if g.dim() > 1 and g.any()
        ]
        return Errors.of(tallies).row() | {
            "median_tensor": float(f"{statistics.median(each):.4g}"),
            "worst_tensor": float(f"{max(each):.4g}"),
        }

    def calls(self, batches: int) -> Iterator[list[Call]]:
        """Yield the calls of operators of each batch."""
        for batch in self.batches[:batches]:
            with Recorder() as recorder:
                gradients(self.module, batch)
            yield recorder.calls


def gradients(module: nn.Module, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Compute the gradient of the mean cross-entropy by parameter."""
    images, labels = batch
    Redrawn.step += 1
    module.zero_grad()
    F.cross_entropy(module(images), labels).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in module.parameters()]


# Sets of formats for all operators at once: the first, then variations of it.
BASE = {
    **dict.fromkeys(EXACT, "int4 nearest"),
    "norm": "int4 nearest/row",
    "query_key": "int8",
    "softmax": "int8",
    "slope": "slope 4 bits",
}
SETS: dict[str, dict[str, str]] = {
    "int4 nearest; q, k, softmax int8; slopes 4 bits": BASE,
    "slopes 3 bits": {**BASE, "slope": "slope 3 bits"},
    "input of GELU int4": {**BASE, "slope": "input int4"},
    "v, output int8": {**BASE, "value_output": "int8"},
    "q, k int6": {**BASE, "query_key": "int6"},
    "q, k int4 nearest": {**BASE, "query_key": "int4 nearest"},
    "norm int2/row": {**BASE, "norm": "int2/row"},
    "all int4 dithered": {**dict.fromkeys(EXACT, "int4"), "slope": "slope 4 bits"},
    "all int4 redrawn": {**dict.fromkeys(EXACT, "int4 redrawn"), "slope": "slope 4 bits"},
    "all int8; norm int4/row": {**dict.fromkeys(EXACT, "int8"), "norm": "int4/row", "slope": "slope 4 bits"},
}
METHODS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "hot-unbiased": ("hot-unbiased", {}, BASE),
    "hot-unbiased, memory=block": ("hot-unbiased", {"memory": "block"}, BASE),
    "hot-unbiased, memory=block, q, k int6": ("hot-unbiased", {"memory": "block"}, SETS["q, k int6"]),
    "hot-unbiased, saved_bits=4": ("hot-unbiased", {"saved_bits": 4}, BASE),
    "hot": ("hot", {}, BASE),
}


def _llama_like() -> dict[str, Any]:
    from timm.layers import RmsNorm, SwiGLU

    return {"depth": 4, "norm_layer": RmsNorm, "mlp_layer": SwiGLU, "act_layer": nn.SiLU}


def _group_normed() -> dict[str, Any]:
    from timm.layers import GroupNorm

    return {"norm_layer": GroupNorm, "layers": (1, 1, 1, 1)}


# model → its base, and its other arguments; the last two, shallower, have operators that the first two do not have.
MODELS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "small_vit": ("small_vit", dict),
    "small_resnet18": ("small_resnet18", dict),
    "small_vit_rms_swiglu": ("small_vit", _llama_like),
    "small_resnet_groupnorm": ("small_resnet18", _group_normed),
}


def trained(name: str, data: ArrayData, steps: int, size: int, batches: int, weights: Path | None) -> Model:
    """Train a model with AdamW.

    Args:
        name: one of `MODELS`.
        data: the images.
        steps: number of updates.
        size: images per batch.
        batches: number of further batches to measure on.
        weights: folder to read trained weights from, or to write them to.
    """
    base, args = MODELS[name]
    torch.manual_seed(0)
    module = create_model(
        base, classes=len(data.classes), channels=data.channels, image_size=data.image_size, args=args()
    )
    for block in getattr(module, "blocks", ()):
        block.attn.fused_attn = name != "small_vit_rms_swiglu"
    order = torch.randperm(data.train_size, generator=torch.Generator().manual_seed(0)).split(size)
    mean, std = (f(data.x_train[:5000].float(), (0, 2, 3))[:, None, None] for f in (torch.mean, torch.std))
    feed = [((data.x_train[rows].float() - mean) / std, data.y_train[rows]) for rows in order[: steps + batches]]
    file = None if weights is None else weights / f"{name}_{steps}x{size}.pt"
    if file is not None and file.is_file():
        module.load_state_dict(torch.load(file))
    else:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.05)
        for step, (images, labels) in enumerate(feed[:steps]):
            optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, (step + 1) / 20)
            optimizer.zero_grad()
            loss = F.cross_entropy(module(images), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            if step % 20 == 19:
                print(f"{name}: update {step + 1}, loss {loss.item():.3f}", flush=True)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(module.state_dict(), file)
    return Model(name, module.train(), feed[steps:])


def measured(model: Model, call_batches: int, only: str = "") -> Iterator[dict[str, Any]]:
    """Yield the records of one model: operators, then sets of formats, then methods.

    Args:
        model: the trained model.
        call_batches: number of batches whose calls are replayed.
        only: a part of operators' names: only these operators, and nothing else.
    """
    for (name, form), found in by_operator(model.calls(call_batches), only).items():
        operator = next(operator for operator in OPERATORS if operator.name == name)

        @contextlib.contextmanager
        def within(operator: Operator = operator, form: str = form) -> Iterator[None]:
            with chosen({operator.entry: form}), Only(operator.functions):
                yield

        yield {"subject": f"{model.name}/{name}", "variant": form, **found, "model": model.errors(within)}
    if only:
        return
    if model.name == "small_vit":

        @contextlib.contextmanager
        def behind() -> Iterator[None]:
            with chosen({"linear": "derived"}), BehindGelu():
                yield

        name = "fc2 from the GELU's input in int4"
        yield {"subject": f"{model.name}/linear", "variant": name, "model": model.errors(behind)}
    for name, formats in SETS.items():

        @contextlib.contextmanager
        def together(formats: dict[str, str] = formats) -> Iterator[None]:
            with chosen(formats), Compressed(Buffers()):
                yield

        yield {"subject": f"{model.name}/all", "variant": name, "model": model.errors(together)}
    for name, (preset, overrides, formats) in METHODS.items():
        module = copy.deepcopy(model.module)
        hotrain.manual_seed(0)
        hotrain.convert(module, hotrain.preset(preset).override(**overrides), plan="memory")
        within = partial(chosen, formats)
        yield {"subject": f"{model.name}/methods", "variant": name, "model": model.errors(within, module)}


def main() -> None:
    """Train and measure the models, write and print the records."""
    parser = parser_of(__doc__)
    parser.add_argument("--data", required=True, help="an .npz file, or a name that hotrain.train.load_data knows")
    parser.add_argument("--models", default="small_vit,small_resnet18", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--steps", type=int, default=100, help="updates before anything is measured")
    parser.add_argument("--batch", type=int, default=32, help="images per batch")
    parser.add_argument("--batches", type=int, default=4, help="batches for the whole model's gradient")
    parser.add_argument("--call-batches", type=int, default=2, help="those of them whose calls are replayed")
    parser.add_argument("--only", default="", help="a part of an operator's name: nothing else is measured")
    parser.add_argument("--weights", type=Path, help="folder to store the trained weights for the next time")
    args = parser.parse_args()
    data = load_data(args.data)
    if not isinstance(data, ArrayData):
        parser.error("--data: an .npz file of small images")
    common = conditions(torch.device("cpu"), sys.argv, args.commit)
    empty = dict.fromkeys(("median_ms", "spread_ms", "peak_bytes", "activation_bytes"))
    for name in args.models.split(","):
        model = trained(name, data, args.steps, args.batch, args.batches, args.weights)
        for row in measured(model, args.call_batches, args.only):
            write(args.out, {**empty, "bench": "formats", **row, **common})
            print(row["subject"], row["variant"], row.get("bytes_entry"), row.get("gradients", ""), row["model"])
            sys.stdout.flush()


if __name__ == "__main__":
    main()

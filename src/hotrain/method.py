"""A method as data: how a layer computes its two gradients, and what it saves between forward and backward.

::

    exact   y = x wᵀ      g_x = g_y w                       g_w = g_yᵀ x                 saved: x
    HOT     y = x wᵀ      g_x = Q4(g_y H) Q4(Hᵀ w)          g_w = Q8(P g_y)ᵀ Q8(P x)     saved: Q8(P x)

`GradInput` describes the first gradient, `GradWeight` the second, `Saved` the last column; `Method` is the
row. Values are frozen and validated when built; nothing here computes anything. The two formulas are in
`hotrain.backward`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

ROUNDINGS = ("stochastic", "nearest", "pseudo")
SCALES = ("tensor", "token", "auto")
ORDERS = ("lp_l1", "sequency", "auto")
BITS = (4, 8, None)
FP8 = ("e4m3", "e5m2")
NUMBERS = ("int", *FP8)
TILES = (1, 16, 64)
FORWARDS = ("exact", "fp8", "int8")
MEMORIES = ("linear", "block")
# number of g_y, or of x → that of w beside g_y, and of x
PARTNER = {"int": "int", "luq": "int", "sawb": "int", "e4m3": "e4m3", "e5m2": "e4m3"}


def _require(owner: str, name: str, value: object, allowed: Iterable[object]) -> None:
    """Raise `ValueError` unless `value` is one of `allowed` (compared with its type: True is not 1)."""
    if not any(value is a or (type(value) is type(a) and value == a) for a in allowed):
        raise ValueError(f"{owner}: {name}={value!r} is not one of {', '.join(map(repr, allowed))}")


def _require_int(owner: str, name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{owner}: {name}={value!r} is not an integer from {low} to {high}")


def _require_fields(owner: str, part: object, number: str, accepted: Mapping[str, tuple[object, ...]]) -> None:
    """Raise `ValueError` unless every field of `part` has one of the values that the number goes with."""
    got = {name: getattr(part, name) for name in accepted}
    wrong = {name: value for name, value in got.items() if value not in accepted[name]}
    if wrong:
        raise ValueError(
            f"{owner}: number={number!r} with {', '.join(f'{k}={v!r}' for k, v in wrong.items())} is not defined; "
            f"accepted are {', '.join(f'{k}={accepted[k][0]!r}' for k in wrong)}"
        )


@dataclass(frozen=True)
class GradInput:
    """The path of ``g_x = g_y w``.

    Attributes:
        transform: ``"hadamard"`` rotates the output channels of both operands before they are quantized (without
            bits the rotation cancels in the product and is skipped); ``"lowpass"`` keeps `GradWeight`'s rows of
            the tokens of g_y and transforms the product back (LBP-WHT); None leaves both operands as they are.
        bits: 4 or 8 bits per code of g_y and w; None is not quantized.
        number: ``"int"`` symmetric integers; ``"e4m3"`` or ``"e5m2"`` that fp8 format for g_y and e4m3 for w, with
            bits=8, both rounded to nearest with per-tensor scales; ``"luq"`` signed powers of two for g_y, SAWB
            integers for w.
        scale: of g_y, per tensor (``"tensor"``) or per token (``"token"``); ``"auto"`` is per token until a
            calibration decides, and per tensor for fp8.
        rounding: of g_y, ``"stochastic"``, ``"nearest"`` or ``"pseudo"``.
        weight_scale: of w, per tensor (``"tensor"``) or per input channel (``"column"``).
        weight_rounding: of w.

    Raises:
        ValueError: a field has a value that is not accepted, or that is not accepted with the others.
    """

    transform: str | None = None
    bits: int | None = None
    number: str = "int"
    scale: str = "auto"
    rounding: str = "stochastic"
    weight_scale: str = "tensor"
    weight_rounding: str = "nearest"

    def __post_init__(self) -> None:
        _require("grad_input", "transform", self.transform, (None, "hadamard", "lowpass"))
        _require("grad_input", "bits", self.bits, BITS)
        _require("grad_input", "number", self.number, ("int", *FP8, "luq"))
        _require("grad_input", "scale", self.scale, SCALES)
        _require("grad_input", "rounding", self.rounding, ROUNDINGS)
        _require("grad_input", "weight_scale", self.weight_scale, ("tensor", "column"))
        _require("grad_input", "weight_rounding", self.weight_rounding, ROUNDINGS)
        if self.transform == "lowpass" and self.bits is not None:
            raise ValueError("grad_input: the low-pass transform is not combined with bits; use bits=None")
        if self.number == "luq" and (self.bits != 4 or self.transform is not None):
            raise ValueError(
                f"grad_input: number='luq' with bits={self.bits!r}, transform={self.transform!r} is not defined; "
                "accepted are bits=4 and transform=None"
            )
        if self.number in FP8:
            nearest = {"rounding": ("nearest",), "weight_rounding": ("nearest",)}
            scales = {"scale": ("tensor", "auto"), "weight_scale": ("tensor",)}
            _require_fields("grad_input", self, self.number, {"bits": (8,), **scales, **nearest})

    @property
    def is_exact(self) -> bool:
        """Whether g_x is PyTorch's."""
        return self.bits is None and self.transform != "lowpass"

    @cached_property
    def multiplies_codes(self) -> bool:
        """Whether the product is one of integer or fp8 codes."""
        return self.bits is not None and self.number != "luq"

    @cached_property
    def scale_axis(self) -> str:
        """The scale in force: without a calibration, ``"auto"`` is per token (fp8: per tensor)."""
        if self.scale == "auto":
            return "tensor" if self.number in FP8 else "token"
        return self.scale

    def __str__(self) -> str:
        if self.transform == "lowpass":
            return "g_x:lowpass"
        if self.bits is None:
            return "g_x:exact"
        rotated = "H16·" if self.transform == "hadamard" else ""
        number = f"int{self.bits}/{self.scale}" if self.number == "int" else self.number
        return f"g_x:{rotated}{number}"


@dataclass(frozen=True)
class GradWeight:
    """The path of ``g_w = g_yᵀ x``.

    Attributes:
        tile: number of tokens per block: 1 (no transform), 16 or 64.
        rank: P keeps `rank` of the `tile` Walsh rows of every block.
        sampled: how many of the `rank` rows are drawn anew for every block from the rows that are not fixed, and
            scaled so that E[PᵀP] is the identity. 0 is the fixed low-pass of the papers.
        order: which rows count as low: ``"lp_l1"`` by v+h on 2-D tiles of a token grid, ``"sequency"`` in one
            dimension, ``"auto"`` the first where a grid is known and the second elsewhere.
        bits: 4 or 8 bits per code of P g_y; with `Saved.bits` also an integer product. None is a floating-point
            product.
        number: of P g_y, as in `GradInput`; with an fp8 format x is e4m3.
        rounding: of P g_y.
        scale: of P g_y: ``"tensor"``, or ``"column"``: of each output, for integers and an input saved with one scale.
        drop: the fraction of the elements of g_y set to zero at random (EVMT's dropout control).
        share: of the kept rows that the product takes; below 1 they are drawn in backward, by the norms of both
            operands' rows, and weighted so that g_w is unbiased (`hotrain.transform.importance`). Of convolutions whose
            patches overlap, of the output's lines (`hotrain.convolution`).

    Raises:
        ValueError: a field has a value that is not accepted, or that is not accepted with the others.
    """

    tile: int = 1
    rank: int = 1
    sampled: int = 0
    order: str = "auto"
    bits: int | None = None
    number: str = "int"
    rounding: str = "stochastic"
    scale: str = "tensor"
    drop: float = 0.0
    share: float = 1.0

    def __post_init__(self) -> None:
        _require("grad_weight", "tile", self.tile, TILES)
        _require_int("grad_weight", "rank", self.rank, 1, self.tile)
        _require_int("grad_weight", "sampled", self.sampled, 0, self.rank)
        _require("grad_weight", "order", self.order, ORDERS)
        _require("grad_weight", "bits", self.bits, BITS)
        _require("grad_weight", "number", self.number, ("int", *FP8, "luq"))
        _require("grad_weight", "rounding", self.rounding, ROUNDINGS)
        _require("grad_weight", "scale", self.scale, ("tensor", "column"))
        if not (isinstance(self.drop, float) and 0.0 <= self.drop < 1.0):
            raise ValueError(f"grad_weight: drop={self.drop!r} is not a float in [0, 1)")
        if not (isinstance(self.share, float) and 0.0 < self.share <= 1.0):
            raise ValueError(f"grad_weight: share={self.share!r} is not a float in (0, 1]")
        if self.number != "int":
            own = {"bits": (4,), "share": (1.0,)} if self.number == "luq" else {"bits": (8,), "rounding": ("nearest",)}
            _require_fields("grad_weight", self, self.number, {**own, "scale": ("tensor",)})

    @property
    def is_low_rank(self) -> bool:
        """Whether fewer rows are kept than a tile has."""
        return self.rank < self.tile

    @property
    def fixed(self) -> int:
        """How many of the rows are the same in every block."""
        return self.rank - self.sampled

    @cached_property
    def multiplies_codes(self) -> bool:
        """As in `GradInput`."""
        return self.bits is not None and self.number != "luq"

    @property
    def is_exact(self) -> bool:
        """Whether g_w is PyTorch's, of an input saved whole."""
        return self.tile == 1 and self.bits is None and self.drop == 0.0 and self.share == 1.0

    def __str__(self) -> str:
        parts = [part for part in (self.rows_text, self.number_text) if part]
        if self.drop:
            parts.append(f"drop{self.drop:g}")
        if self.share < 1:
            parts.append(f"share{self.share:g}")
        return "g_w:" + ("·".join(parts) or "exact")

    @property
    def rows_text(self) -> str:
        """P in text: ``"P8of16"``, ``"P4+4of16"`` with drawn rows, ``"H16"`` for all rows, empty for none.

        An order that is not ``"auto"`` follows: ``"P8of16/sequency"``.
        """
        if self.tile == 1:
            return ""
        if self.rank == self.tile:
            return f"H{self.tile}"
        rows = f"{self.fixed}+{self.sampled}" if self.sampled else f"{self.rank}"
        return f"P{rows}of{self.tile}" + ("" if self.order == "auto" else f"/{self.order}")

    @property
    def number_text(self) -> str:
        """The codes in text, empty for a product in floating point."""
        each = "/column" if self.scale == "column" else ""
        return "" if self.bits is None else f"int{self.bits}{each}" if self.number == "int" else self.number


@dataclass(frozen=True)
class Saved:
    """The format in which forward saves P x for ``g_w``.

    Attributes:
        bits: 8, 4 (two codes per byte), or None for P x in the precision of x.
        number: ``"int"`` scales by amax; ``"e4m3"`` is fp8, with bits=8, rounded to nearest, per-tensor scale;
            ``"sawb"`` clips as LUQ's forward operands do.
        scale: of P x: ``"tensor"``, or ``"row"``: of each token-frequency, which backward folds into that row of g_y.
        rounding: of P x.

    Raises:
        ValueError: a field has a value that is not accepted, or that is not accepted with the others.
    """

    bits: int | None = None
    number: str = "int"
    scale: str = "tensor"
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        _require("saved", "bits", self.bits, BITS)
        _require("saved", "number", self.number, ("int", "e4m3", "sawb"))
        _require("saved", "scale", self.scale, ("tensor", "row"))
        _require("saved", "rounding", self.rounding, ROUNDINGS)
        if self.number == "sawb" and self.bits != 4:
            raise ValueError(f"saved: number='sawb' with bits={self.bits!r} is not defined; accepted is bits=4")
        if self.number == "e4m3":
            _require_fields("saved", self, self.number, {"bits": (8,), "scale": ("tensor",), "rounding": ("nearest",)})

    @property
    def fits_e4m3(self) -> bool:
        """Whether all codes are numbers of e4m3, so that a product of fp8 codes takes them as they are."""
        return self.number == "e4m3" or (self.number == "int" and self.bits == 4)

    def __str__(self) -> str:
        if self.bits is None:
            return "saved:Px"  # P is the identity where tile is 1
        return "saved:e4m3" if self.number == "e4m3" else f"saved:{self.number}{self.bits}/{self.scale}"


@dataclass(frozen=True)
class Method:
    """How a layer computes its two gradients and what it saves for them.

    Build one with `hotrain.preset`, vary it with `override`.

    Attributes:
        name: of the preset that it was built from.
        grad_input: how g_x is computed.
        grad_weight: how g_w is computed.
        saved: the format in which the input is saved.
        knobs: the overrides that this method accepts; not printed, since sets differ in order between processes.
        forward: product of Linear layers: ``"exact"``, or of ``"fp8"`` or ``"int8"`` codes (`hotrain.forward`).
        memory: which activations are compressed: ``"linear"``, the inputs that converted layers save, or ``"block"``,
            all other saved activations as well (`hotrain.compress`).
        automatic: whether the number format follows the device: e4m3 where it has fp8 matrix units, else the given
            integers (`on_device`). Only our own methods do; published methods stay as published.

    Raises:
        ValueError: a combination of fields is not defined; the message names them.
    """

    name: str
    grad_input: GradInput = field(default_factory=GradInput)
    grad_weight: GradWeight = field(default_factory=GradWeight)
    saved: Saved = field(default_factory=Saved)
    knobs: frozenset[str] = field(default=frozenset(), repr=False)
    forward: str = "exact"
    memory: str = "linear"
    automatic: bool = False

    def __post_init__(self) -> None:
        _require(self.name, "forward", self.forward, FORWARDS)
        _require(self.name, "memory", self.memory, MEMORIES)
        if self.grad_input.transform == "lowpass" and self.grad_weight.tile == 1:
            raise ValueError(f"{self.name}: a low-pass grad_input needs the rows of grad_weight (tile > 1)")
        g_w, saved = self.grad_weight, self.saved
        fits = PARTNER[g_w.number] == PARTNER[saved.number] or (g_w.number in FP8 and saved.fits_e4m3)
        if g_w.bits and saved.bits and g_w.number != "luq" and not fits:
            raise ValueError(
                f"{self.name}: a product of {g_w} with {saved} is not defined; accepted are integers for both, or fp8 "
                "(e4m3, e5m2) for grad_weight with number='e4m3' or integers of 4 bits for saved"
            )
        if g_w.scale == "column" and saved.scale == "row":
            raise ValueError(f"{self.name}: {g_w} with {saved} is not defined; accepted for g_w: scale='tensor'")
        if self.automatic and not self.has_fp8_form:
            raise ValueError(
                f"{self.name}: number='auto' chooses between integers and fp8; it needs integers on both paths and "
                f"of what is kept, got {self.grad_input}, {g_w}, {saved}"
            )

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Method:
        """The method of JSON values, as `dataclasses.asdict` gives them, with the knobs as a list.

        Raises:
            KeyError, TypeError: a field is missing or unknown.
            ValueError: as for the class.
        """
        parts = {"grad_input": GradInput, "grad_weight": GradWeight, "saved": Saved}
        read = {name: part(**value[name]) for name, part in parts.items()}
        return cls(**{**value, **read, "knobs": frozenset(value["knobs"])})

    @property
    def has_fp8_form(self) -> bool:
        """Whether ``override(number="e4m3")`` turns the method from integers to fp8."""
        g_x, g_w, saved = self.grad_input, self.grad_weight, self.saved
        integers = g_x.number == g_w.number == saved.number == "int"
        return "number" in self.knobs and integers and bool(g_x.bits and g_w.bits and saved.bits)

    def on_device(self, fp8: bool) -> Method:
        """The method with its number format chosen for a device.

        Args:
            fp8: whether the device has fp8 matrix units.
        """
        return self.override(number="e4m3" if fp8 else "int") if self.automatic else self

    @property
    def is_exact(self) -> bool:
        """Whether a layer's product and gradients are those of PyTorch, computed from its whole input."""
        exact = self.grad_input.is_exact and self.grad_weight.is_exact and self.saved.bits is None
        return exact and self.forward == "exact"

    @property
    def is_plain(self) -> bool:
        """Whether a model trains, and saves activations, as without hotrain."""
        return self.is_exact and self.memory == "linear"

    @property
    def compresses(self) -> bool:
        """Whether a layer saves less than its whole input."""
        return self.saved.bits is not None or self.grad_weight.is_low_rank

    @property
    def draws(self) -> bool:
        """Whether a training step of this method draws random numbers."""
        g_x, g_w, saved = self.grad_input, self.grad_weight, self.saved
        return bool(
            g_w.sampled
            or g_w.drop
            or g_w.share < 1
            or "luq" in (g_x.number, g_w.number)
            or (g_x.bits and "stochastic" in (g_x.rounding, g_x.weight_rounding))
            or (g_w.bits and g_w.rounding == "stochastic")
            or (saved.bits and saved.rounding == "stochastic")
        )

    def override(self, **overrides: Any) -> Method:
        """A copy of this method with some settings changed.

        Args:
            **overrides: new values, by name:

                - ``rank``, ``sampled``, ``order``: of the rows kept along the tokens. A new rank without ``sampled``
                  keeps the share of drawn rows.
                - ``share``: of the kept rows, those that backward multiplies, in (0, 1].
                - ``grad_input_bits``, ``grad_weight_bits``, ``saved_bits``: 4, 8, or None for not quantized.
                - ``scale``: of g_y in the g_x path: ``"tensor"``, ``"token"`` or ``"auto"``.
                - ``forward``: ``"exact"``, ``"fp8"`` or ``"int8"``: the forward product of Linear layers, for every
                  method.
                - ``memory``: ``"linear"`` or ``"block"``, for every method: with `exact`, products stay exact and
                  saved activations do not.
                - ``rounding``: of g_y on both paths and of x: ``"stochastic"``, ``"nearest"`` or ``"pseudo"``.
                - ``number``: ``"e4m3"`` or ``"e5m2"`` turns an integer method into fp8: g_y of both paths in that
                  format, w and the saved x in e4m3, 8 bits each, per-tensor scales, rounded to nearest; x in 4 bits
                  stays, since its codes are numbers of e4m3. Bits, scale and rounding are then fixed. ``"int"``: the
                  integers of the preset, on every device. ``"auto"``: e4m3 where the device has fp8 matrix units, else
                  the integers; an override of bits or rounding fixes the integers.

        Raises:
            ValueError: an override is unknown, does not apply to this method, or has a bad value; the message names
                the field, the value and what is accepted.
        """
        for name in ("forward", "memory"):
            if name in overrides:
                return replace(self, **{name: overrides.pop(name)}).override(**overrides)
        for name in overrides:
            if name not in KNOBS:
                known = ", ".join(sorted(KNOBS | {"forward", "memory"}))
                raise ValueError(f"{self.name}: unknown override {name!r}; known: {known}")
        if "number" in self.knobs and "number" in overrides:
            number = overrides.pop("number")
            if number == "auto":  # bits and rounding first: the choice is between what they give
                return self.override(**overrides)._in_number(number)
            return self._in_number(number).override(**overrides)
        for name in overrides:
            if name not in self.knobs:
                known = ", ".join(sorted(self.knobs)) or "none"
                what = f"{self.name} in fp8" if self.grad_weight.number in FP8 else self.name
                raise ValueError(f"{what}: {name}={overrides[name]!r} does not concern it; its overrides: {known}")
        g_x, g_w, saved = self.grad_input, self.grad_weight, self.saved
        if "rank" in overrides:
            rank = overrides["rank"]
            _require_int(self.name, "rank", rank, 1, g_w.tile)
            # A method that draws goes on drawing: without one drawn row it would lose its unbiasedness.
            drawn = max(1, round(rank * g_w.sampled / g_w.rank)) if g_w.sampled else 0
            g_w = replace(g_w, rank=rank, sampled=0 if "sampled" in overrides else drawn)
        if "sampled" in overrides:
            _require_int(self.name, "sampled", overrides["sampled"], 0, g_w.rank)
        if "share" in overrides and not (isinstance(overrides["share"], float) and 0.0 < overrides["share"] <= 1.0):
            raise ValueError(f"{self.name}: share={overrides['share']!r} is not a float in (0, 1]")
        for name, accepted in ACCEPTED.items():
            if name in overrides:
                _require(self.name, name, overrides[name], accepted)
        if overrides.get("saved_bits") == 4 and saved.bits != 4 and saved.number == "int":
            # With 4 bits, rows of unequal size need per-row scales and unbiased rounding (docs/maths.md).
            saved = replace(saved, bits=4, scale="row", rounding="stochastic")
            g_w = replace(g_w, scale="tensor")  # the scales of rows are in its codes

        def set_in(part: Any, fields: Mapping[str, str]) -> Any:
            return replace(part, **{fields[name]: overrides[name] for name in fields.keys() & overrides.keys()})

        g_x = set_in(g_x, {"grad_input_bits": "bits", "scale": "scale", "rounding": "rounding"})
        own = {name: name for name in ("sampled", "share", "order", "rounding")}
        g_w = set_in(g_w, {**own, "grad_weight_bits": "bits"})
        saved = set_in(saved, {"saved_bits": "bits", "rounding": "rounding"})
        # Setting bits or rounding fixes the integers; a scale applies to the integers only.
        unchanged = (g_x, g_w, saved) == (self.grad_input, self.grad_weight, self.saved)
        automatic = self.automatic and (unchanged or {*FP8_KNOBS, "scale"}.issuperset(overrides))
        return replace(self, grad_input=g_x, grad_weight=g_w, saved=saved, automatic=automatic)

    def _in_number(self, number: str) -> Method:
        """The override `number`."""
        _require(self.name, "number", number, (*NUMBERS, "auto"))
        g_x, g_w, saved = self.grad_input, self.grad_weight, self.saved
        if number in (g_w.number, "auto"):
            return replace(self, automatic=number == "auto")
        if number == "int":
            raise ValueError(
                f"{self.name} in fp8: number='int' does not bring its bits and rounding back; "
                f"start from preset({self.name!r})"
            )
        if not (g_x.bits and g_w.bits and saved.bits):
            raise ValueError(
                f"{self.name}: number={number!r} needs codes on both paths and of what is kept, got {g_x}, {g_w}, "
                f"{saved}"
            )
        g_x = replace(g_x, weight_scale="tensor", weight_rounding="nearest")
        # fp8 represents outliers without a rotation (docs/maths.md), so its cost is saved.
        g_x = replace(g_x, number=number, bits=8, transform=None, scale="tensor", rounding="nearest")
        g_w = replace(g_w, number=number, bits=8, rounding="nearest", scale="tensor")
        if not saved.fits_e4m3:
            saved = replace(saved, number="e4m3", scale="tensor", rounding="nearest")
        knobs = self.knobs & FP8_KNOBS
        return replace(self, grad_input=g_x, grad_weight=g_w, saved=saved, knobs=knobs, automatic=False)

    def __str__(self) -> str:
        block = "" if self.memory == "linear" else f"  memory:{self.memory}"
        if self.is_exact:
            return self.name + ("" if self.name == "exact" else "  exact") + block
        forward = "" if self.forward == "exact" else f"y:{self.forward}  "
        number = "  number:auto" if self.automatic else ""
        return f"{self.name}  {forward}{self.grad_input}  {self.grad_weight}  {self.saved}{block}{number}"


ACCEPTED = {
    "order": ORDERS,
    "grad_input_bits": BITS,
    "grad_weight_bits": BITS,
    "saved_bits": BITS,
    "scale": SCALES,
    "rounding": ROUNDINGS,
}
KNOBS = frozenset({"rank", "sampled", "share", "number", *ACCEPTED})
FP8_KNOBS = frozenset({"rank", "sampled", "share", "order", "number"})

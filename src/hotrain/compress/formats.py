"""Number formats in which tensors are saved between forward and backward; `rules` says which operation has which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..saved import Bits, Grouped, Levels, Logarithmic, as_it_was, group_size, memory_order
from . import rules
from .launcher import opaque

# Rounded to nearest: stochastic rounding has no bias, but 1.5 times the error (docs/numerics.md).
GROUPED = {
    "int8": Grouped(8),
    "int4 nearest": Grouped(4),
    "int4 nearest/row": Grouped(4, whole=True),  # a per-row scale: a norm reduces over the row anyway
    "log8/row": Logarithmic(whole=True),
}
BITS = Bits()

# Derivatives in 4 bits, from -2/11 to 13/11: the range of GELU (-0.13 to 1.13), SiLU (-0.10 to 1.10) and Mish.
SLOPES = Levels(4, first=-2, per_one=11)

# operator → format of what it saves
FORMATS = {operator: form for rule in rules.RULES for operator, form in rule.formats.items()}

_COLUMNS = 16  # the least elements of a row that is quantized in groups


def _keep(t: Tensor, form: str) -> tuple[Tensor, ...]:
    return GROUPED[form].keep(t)


def _restore(form: str, kept: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return restored(GROUPED[form], kept, shape, dtype)


def restored(form: Grouped | Levels | Bits, kept: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """``form.restore(kept, shape, dtype)``, for graphs too.

    Inductor's C++ backend (PyTorch 2.13, `try_loop_split`) leaves out the end of rows that groups do not divide: it
    splits the loop over a row into whole groups. On a CPU it gets the padded rows, and an operator that cuts them.
    """
    first = kept[0]
    if type(first) is not Tensor and first.device.type == "cpu" and isinstance(form, Grouped):
        columns, size = int(shape[-1]), group_size(int(shape[-1]), form.whole)
        if columns > size and columns % size:
            padded = form.restore(kept, (*shape[:-1], -(-columns // size) * size), dtype)
            return torch.ops.hotrain.cut(padded, columns)  # type: ignore[no-any-return]
    return form.restore(kept, shape, dtype)


opaque("cut(Tensor rows, int columns) -> Tensor", lambda rows, n: rows.new_empty((*rows.shape[:-1], n)), inlined=False)(
    lambda rows, columns: rows[..., :columns].contiguous()
)


def packer(
    value: Tensor, form: str, keep: Callable[..., Any] = _keep, restore: Callable[..., Tensor] = _restore
) -> tuple[Callable[[Tensor], tuple[Tensor, ...]], Callable[..., Tensor]]:
    """Functions that pack a tensor and unpack it, for functions without an operator of hotrain's.

    Args:
        value: a tensor of the dtype, the shape and the memory layout; its elements are not read.
        form: "int8", "bfloat16" (the error is relative to each element, and none becomes zero), "sign" (one byte per
            element), "shape" (the unpacked tensor has undefined values), "bits" (of booleans) or "rows" (a contiguous
            tensor itself, as a matrix).
        keep: (rows, form) → codes and scales; by the formula, or `codes.pack`, by a kernel.
        restore: (form, codes and scales, shape, dtype) → the rows again; `codes.unpack`.

    Returns:
        A function from the tensor to its codes, and one from the codes to the tensor.
    """
    dtype, shape = value.dtype, value.shape
    if form == "bits":
        return lambda t: BITS.keep(t), lambda codes: BITS.restore(
            (codes,), shape
        )  # to `make_fx` a method has two arguments
    if form == "bfloat16":
        return lambda t: (t.to(torch.bfloat16),), lambda codes: codes.to(dtype)
    if form == "sign":
        return lambda t: (t.sgn().to(torch.int8),), lambda codes: codes.to(dtype)
    if form == "rows":
        return lambda t: (t.view(-1, shape[-1]),), lambda rows: rows.view(shape)
    layout = Rows(value)
    columns = layout.columns
    if form == "shape":
        return lambda t: (layout.of(t)[..., :0].clone(),), (
            lambda codes: layout.back(codes.new_empty((*codes.shape[:-1], columns)))
        )

    def pack(t: Tensor) -> tuple[Tensor, ...]:
        rows = layout.of(t)
        return tuple(part.view(*rows.shape[:-1], *part.shape[1:]) for part in keep(rows, form))

    def unpack(*codes: Tensor) -> Tensor:
        flat = [part.flatten(0, -3) for part in codes]
        rows = restore(form, flat, (flat[0].shape[0], columns), dtype).contiguous()
        return layout.back(rows.view(*codes[0].shape[:-2], columns))

    return pack, unpack


class Rows:
    """A tensor viewed as rows in memory order: its axes by decreasing stride, the last ones joined into a row.

    Codes have the sizes of the other axes, from which backward reads sizes that change from call to call.
    """

    def __init__(self, value: Tensor) -> None:
        if is_static(value):
            self.order = memory_order(value)
        else:
            self.order = sorted(range(value.dim()), key=lambda axis: -hint(value.stride(axis)))
        sizes = [value.shape[axis] for axis in self.order]
        self.joined = 0  # how many of the last axes make a row
        columns: Any = 1
        while self.joined < len(sizes) and (self.joined == 0 or columns < _COLUMNS):
            self.joined += 1
            columns = columns * sizes[-self.joined]
            if not isinstance(columns, int):
                break
        self.row, self.columns = sizes[-self.joined :], columns

    def of(self, t: Tensor) -> Tensor:
        """t as rows, (..., columns)."""
        return t.permute(self.order).unsqueeze(0).flatten(-self.joined)

    def back(self, rows: Tensor) -> Tensor:
        """Undo `of`."""
        return as_it_was(rows.unflatten(-1, self.row).squeeze(0), self.order)


def is_static(value: Tensor) -> bool:
    """Whether no size or stride changes from call to call."""
    return all(isinstance(n, int) for n in (*value.shape, *value.stride()))


def hint(size: Any) -> int:
    """A size as an integer; of a dynamic one, its value when the graph was traced."""
    found = size if isinstance(size, int) else size.node.hint
    return int(found) if found is not None else 1

"""Triton launches with low host overhead: the compiled kernel is looked up once per shape, not once per call.

Triton inspects every argument of a launch to find the compiled kernel; with fifty arguments that takes longer than the
kernel. A caller that passes the specialization itself (`case`: all that the compiled kernel depends on, so shapes,
dtypes, strides, alignments and flags) pays for it once.
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.library import wrap_triton

from ..private import fakes

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# A compiled kernel's launcher, its handle on the device, its metadata, and the values of its constants.
Compiled = tuple[Any, int, Any, tuple[Any, ...]]
_compiled: dict[Hashable, Compiled] = {}  # by case
_MOST = 1 << 14  # of them: inputs of many sizes are many cases


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's `cdiv` and `next_power_of_2` are slower than a launch on the host."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The least power of two that is not less than n."""
    return 1 << (n - 1).bit_length()


def block_of(half: int) -> int:
    """Columns at a time: the largest power of two that divides them, from 32 to 512, else all of them."""
    block = min(half & -half, 512)
    return block if block >= 32 else power_of_2(half)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a device; 4 in the interpreter."""
    return 4 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether the device supports programmatic dependent launch (`griddepcontrol` of sm_90)."""
    if INTERPRETED or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _is_fake(t: Tensor | None) -> bool:
    return type(t) is not Tensor and fakes.include(t)


def aligned(*tensors: Tensor | None) -> bool | tuple[bool, ...]:
    """Which tensors are aligned to 16 bytes, as Triton's wide loads require; True where all are. For a `case`."""
    if _is_fake(tensors[0]):
        return True  # the case of a node is not used: its graph finds out
    addresses = [0 if t is None else t.data_ptr() for t in tensors]
    return functools.reduce(operator.or_, addresses) % 16 == 0 or tuple([n % 16 == 0 for n in addresses])


def is_wide(entries: int) -> bool:
    """Whether offsets exceed 31 bits."""
    return entries >= 1 << 30


Place = tuple[int, int, int, int, int]  # of `in_groups`


@functools.lru_cache(maxsize=1024)
def in_groups(entries: int, columns: int, group: int, *layout: int) -> tuple[int, int, Place, int]:
    """A tensor of such `support.rows_in_memory` in groups along its rows.

    Returns:
        Rows, groups in each, (all groups, contiguous ones, `rows_in_memory`'s three others), and how far they reach.
    """
    rows, groups = entries // columns, columns // group
    run, stride, many, further = layout
    reach = entries if run == rows else max(many * stride, rows // run // many * further)
    return rows, groups, (rows * groups, run * groups, stride, many, further), reach


def is_nested(place: Place) -> bool:
    """Whether runs of contiguous groups have two strides."""
    groups, run, _, many, _ = place
    return groups > run * many


@functools.cache
def _current_stream() -> Any:
    """Triton's function from a device's index to its current stream; `torch.cuda.current_stream` is slower."""
    import triton

    return triton.runtime.driver.active.get_current_stream


def inlines(device: torch.device) -> bool:
    """Whether kernels can be nodes of a compiled graph: on a GPU, where Triton compiles them."""
    return device.type == "cuda" and not INTERPRETED


def is_current(device: torch.device) -> bool:
    """Whether Triton launches there: it does on the current device."""
    index = _index_on_gpu(device)
    return index is None or index == torch.accelerator.current_device_index()


@functools.cache
def _index_on_gpu(device: torch.device) -> int | None:
    return device.index if device.type == "cuda" else None


def launch(
    kernel: Any,
    programs: int | tuple[int, int],
    case: Hashable,
    args: tuple[Any, ...],
    constants: dict[str, Any],
    **options: Any,
) -> Compiled | None:
    """Launch a kernel; of a graph that is traced, it becomes a node (`compress.kernel_nodes`).

    Args:
        kernel: of `triton.jit`.
        programs: grid size, of one axis or two.
        case: equal for two launches only where the same compiled kernel is valid for both.
        args: its first parameters in order, a tensor first.
        constants: its other parameters by name.
        **options: Triton's (num_warps, …).

    Returns:
        The compiled kernel; None of a node and in the interpreter.
    """
    device, grid = args[0].device, programs if isinstance(programs, tuple) else (programs,)
    if _is_fake(args[0]):
        wrap_triton(kernel)[grid](*args, **constants, **options)
        return None
    if not is_current(device):
        with torch.cuda.device(device):
            return launch(kernel, programs, case, args, constants, **options)
    place = (id(kernel), case, tuple(options.items()))  # names are not unique, and kernels are never freed
    found = _compiled.get(place)
    if found is not None:
        run, function, metadata, rest = found
        # What Triton's `compiled[grid]` calls, without its hooks for Triton's own profiler.
        run(*(*grid, 1, 1)[:3], _current_stream()(device.index), function, metadata, None, None, None, *args, *rest)
        return found
    compiled = kernel[grid](*args, **constants, **options)
    if INTERPRETED:
        return None
    rest = tuple(constants[name] for name in kernel.arg_names[len(args) :])
    if len(_compiled) >= _MOST:
        _compiled.clear()
    found = _compiled[place] = compiled.run, compiled.function, compiled.packed_metadata, rest
    return found


@dataclass(frozen=True, eq=False)
class Plan:
    """A launch but for its tensors: made once for their device, shapes and dtypes (`functools`), and run often.

    Attributes:
        kernel, programs, constants: of `launch`.
        numbers: the kernel's parameters behind the tensors.
        warps: per program.
        given: how many of the first tensors are given; the others are new, or given before, and so aligned as these.
        compiled: by alignment of the given tensors.
    """

    kernel: Any
    programs: int | tuple[int, int]
    constants: dict[str, Any]
    numbers: tuple[Any, ...] = ()
    warps: int = 4
    given: int | None = None
    compiled: dict[bool | tuple[bool, ...], Compiled] = field(default_factory=dict, repr=False)

    @functools.cached_property
    def grid(self) -> tuple[int, int, int]:
        """Of three axes."""
        programs = self.programs
        return (*programs, 1) if isinstance(programs, tuple) else (programs, 1, 1)

    def run(self, *tensors: Tensor) -> None:
        """Launch the kernel; of the tensors, their alignment alone may differ between calls."""
        case, device = aligned(*tensors[: self.given]), tensors[0].device
        found = self.compiled.get(case)
        if found is not None and is_current(device) and not _is_fake(tensors[0]):  # as `launch` does again
            run, function, metadata, rest = found
            stream = _current_stream()(device.index)
            run(*self.grid, stream, function, metadata, None, None, None, *tensors, *self.numbers, *rest)
            return
        args = (*tensors, *self.numbers)
        found = launch(self.kernel, self.programs, (self, case), args, self.constants, num_warps=self.warps)
        if found is not None:
            self.compiled[case] = found

"""Launches without the price of Triton's own: which compiled kernel suits is found once a shape, not once a call.

Triton inspects every argument of a launch to find the compiled kernel that suits it; with fifty arguments that takes
longer than the kernel. A caller that names the case itself (`case`: all that the compiled kernel depends on, so shapes,
dtypes, strides, alignments and flags) pays for it once.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

_compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own and the next are made for kernels, and take longer than a launch."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The least power of two that is not less than n."""
    return 1 << (n - 1).bit_length()


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run side by side at least; a few in the interpreter."""
    return 4 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel may be launched while the one before it runs, and wait for that: `griddepcontrol` of sm_90."""
    if INTERPRETED or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def aligned(*tensors: Tensor | None) -> bool:
    """Whether all of them start on a boundary of 16 bytes, as Triton asks for its wide loads."""
    return all(t is None or t.data_ptr() % 16 == 0 for t in tensors)


def is_current(device: torch.device) -> bool:
    """Whether Triton launches there: it does on the current device."""
    return device.type != "cuda" or device.index == torch._C._cuda_getDevice()


def launch(
    kernel: Any, programs: int, case: Hashable, args: tuple[Any, ...], constants: dict[str, Any], **options: Any
) -> None:
    """Run `kernel` with `args`, its first parameters in order, a tensor first, and `constants`, its others by name.

    case: equal for two launches only where the same compiled kernel suits both.  options: Triton's (num_warps, …).
    """
    device = args[0].device
    if not is_current(device):
        with torch.cuda.device(device):
            return launch(kernel, programs, case, args, constants, **options)
    place = (id(kernel), case)  # names are not unique, and kernels live as long as their modules
    found = _compiled.get(place)
    if found is not None:
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        found[0][(programs, 1, 1)](*args, *found[1], stream=stream)
        return
    compiled = kernel[(programs,)](*args, **constants, **options)
    if not INTERPRETED:
        _compiled[place] = compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :])

"""What the kernels support and why not, the switch that turns them off, and the fallback to the reference."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..method import FP8, Method
from ..transform.tokens import Layout

# The activation function after a batch norm → its number in the kernels.
FUNCTIONS = {"": 0, "relu": 1, "relu6": 2, "silu": 3, "hardswish": 4, "gelu": 5, "gelu_tanh": 6}

_Place = TypeVar("_Place")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_SWITCHED_OFF = "the kernels are switched off"


class _Off(threading.local):
    value = False  # of a thread that has not set it


_off = _Off()
_warned: set[str] = set()


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """A context in which every layer uses the reference, as the variable HOTRAIN_KERNELS=0 does for a process."""
    before = _off.value
    _off.value = True
    try:
        yield
    finally:
        _off.value = before


@functools.cache
def unsupported_device(device: torch.device) -> str | None:
    """Why no kernel runs on a device, as a clause; None where they do."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cpu":
        return None if os.environ.get("TRITON_INTERPRET") == "1" else "the kernels run on a GPU"
    if device.type != "cuda" or torch.version.hip is not None:
        return f"the kernels were written for CUDA devices, not for {'ROCm' if torch.version.hip else device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"the kernels need compute capability 8.0, {torch.cuda.get_device_name(device)} has {major}.{minor}"
    return None


@functools.cache
def has_fp8(device: torch.device) -> bool:
    """Whether the device has fp8 matrix units (compute capability 8.9); Triton's interpreter counts as one."""
    if unsupported_device(device) is not None:
        return False
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)


@functools.lru_cache(maxsize=1024)
def _unsupported_method(method: Method) -> str | None:
    g_x, g_w, saved = method.grad_input, method.grad_weight, method.saved
    for bits in (g_x.bits, g_w.bits, saved.bits):
        if bits not in (4, 8, None):
            return f"the kernels have codes of 4 and 8 bits, {method.name} has some of {bits}"
    if g_w.tile != 16:
        return f"the kernels have tiles of 16 tokens, {method.name} has {g_w.tile}"
    if g_w.drop:
        return "the kernels do not drop elements of g_y"
    if g_w.share < 1 and saved.scale != "row":
        return "the kernels choose among rows with scales of their own"
    if g_x.transform == "lowpass" or "luq" in (g_x.number, g_w.number) or saved.number == "sawb":
        return f"the kernels do not support the number formats of {method.name}"
    if "pseudo" in (g_x.rounding, g_x.weight_rounding, g_w.rounding, saved.rounding):
        return "the kernels do not round pseudo-stochastically"
    if (g_w.bits is None) != (saved.bits is None):
        return "the kernels need both operands of g_w quantized, or none"
    if saved.scale == "row" and saved.bits is None:
        return "the kernels give rows scales of their own as integers alone"
    if saved.bits is None or (saved.bits, saved.scale) == (8, "tensor"):
        return None
    if (saved.scale, saved.number) != ("row", "int") or not (g_w.number == "int" or saved.fits_e4m3):
        return "the kernels save x in 8 bits with one scale, or as integers with a scale for each row"
    if method.forward != "exact":
        return "the kernels' forward in low precision saves x with one scale"
    return None


def _off_or_unsupported(device: torch.device) -> str | None:
    return _SWITCHED_OFF if switched_off() else unsupported_device(device)


def _unsupported_dtype(dtype: torch.dtype) -> str | None:
    if dtype in _DTYPES:
        return None
    return f"the kernels take float16, bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"


def reason(method: Method, lay: Layout, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the kernels do not support a layer, as a clause; None where they do.

    Args:
        method: of the layer.
        lay: of x's tokens.
        dtype: of x.
        device: of x.
    """
    found = _off_or_unsupported(device) or _unsupported_method(method) or _unsupported_dtype(dtype)
    if found is not None:
        return found
    numbers = (method.grad_input.number, method.grad_weight.number)
    if not has_fp8(device) and (method.forward == "fp8" or not set(FP8).isdisjoint(numbers)):
        return "the device has no fp8 units"
    if lay.rows == 0:
        return "there are no tokens"
    return None


def buffers_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels of saved activations do not run on a device, as a clause; None where they do."""
    return _off_or_unsupported(device) or _unsupported_dtype(dtype)


def switched_off() -> bool:
    """Whether the kernels are switched off, by `disabled` or for the process."""
    return _off.value or _off_for_the_process()


@functools.cache
def _off_for_the_process() -> bool:
    return os.environ.get("HOTRAIN_KERNELS") == "0"


def note(why: str, device: torch.device, dtype: torch.dtype) -> None:
    """Warn, once for each reason, that a layer on a GPU uses the reference."""
    if why not in _warned and why != _SWITCHED_OFF:
        _warned.add(why)
        warnings.warn(
            f"hotrain: no kernel for {str(dtype).removeprefix('torch.')} on {device.type} here: {why}. The layer "
            "uses the reference in plain PyTorch: the same gradients, slower.",
            stacklevel=3,
        )


@functools.cache
def module(name: str) -> Any:
    """A file of this package that needs Triton, imported at the first call; an import statement would cost more."""
    return importlib.import_module(f"{__package__}.{name}")


# --- a kernel that does not compile


_broken: set[str] = set()


@functools.cache
def compiler_errors() -> tuple[type[Exception], ...]:
    """What Triton raises for a kernel that cannot be compiled, or not be launched on a device."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import TritonError

    return CompilationError, TritonError


def or_reference(name: str, kernel: Callable[..., Any], reference: Callable[[], Any], *args: Any) -> Any:
    """`kernel(*args)`, or, where it cannot be compiled or launched here, `reference()`, from then on."""
    if name in _broken:
        return reference()
    try:
        return kernel(*args)
    except compiler_errors() as error:
        _broken.add(name)
        warnings.warn(
            f"hotrain: the kernel {name!r} failed on this device ({type(error).__name__}: "
            f"{str(error).strip().splitlines()[-1] if str(error).strip() else ''}); the reference in plain PyTorch "
            "replaces it, slower.",
            stacklevel=4,
        )
        return reference()


# --- kernels, each with its reference as fallback


@functools.cache
def _kernel(name: str) -> Callable[..., Any]:
    file, _, function = name.partition(".")
    found: Callable[..., Any] = getattr(module(file), function)
    return found


def run(name: str, reference: Callable[[], Any], *args: Any) -> Any:
    """Call a kernel, or the reference from the first time that the kernel cannot be compiled or launched here.

    Args:
        name: ``"file.function"`` of this package; the file is imported at its first call, since it needs Triton.
        reference: computes the same in plain PyTorch.
        *args: of the function.
    """
    return or_reference(name, _kernel(name), reference, *args)


def rows_in_memory(t: Tensor) -> tuple[int, int, int, int] | None:
    """Where rows of t's last axis are in memory, as kernels read them; None for another layout.

    Returns:
        (contiguous rows, stride to the next ones, how many of these, stride to the next of those).
    """
    try:
        return _rows_in_memory(t.shape, t.stride())
    except TypeError:  # under Dynamo sizes may be symbolic, which are not hashable
        return _rows_in_memory.__wrapped__(t.shape, t.stride())


@functools.lru_cache(maxsize=1024)
def _rows_in_memory(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int, int, int] | None:
    *sizes, columns = shape
    if strides[-1] != 1:
        return None
    levels = [(1, columns)]  # (how many, stride), from the inside
    for size, stride in zip(reversed(sizes), reversed(strides[:-1]), strict=True):
        many, inner = levels[-1]
        if size != 1 and stride == many * inner:
            levels[-1] = many * size, inner
        elif size != 1:
            levels.append((size, stride))
    if len(levels) > 3:
        return None
    run = levels[0][0]
    many, stride = levels[1] if len(levels) > 1 else (1, run * columns)
    return run, stride, many, levels[2][1] if len(levels) > 2 else many * stride


def written_over(g: _Place, other: _Place | None, passes_on: bool) -> _Place | None:
    """What batch norm's gradient, in place, writes g_x over, of tensors or of nodes; None for memory of its own.

    By then other has been read. Without one it is g, which has the shortcut's gradient if that is passed on.
    """
    return other if other is not None else None if passes_on else g

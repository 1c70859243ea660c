"""Launch of the kernels of compressed activations (`hotrain.kernels`), with a reference in PyTorch as fallback."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import autograd
from ..private import constant_in_graphs, dispatch_modes

_lib = torch.library.Library("hotrain", "FRAGMENT")
_implementations: dict[str, Callable[..., Any]] = {}  # opaque operator → its Python function


@functools.cache
def _kind(device: torch.device) -> str:
    """Its type, which PyTorch writes as a new string each time."""
    return device.type


@constant_in_graphs
def supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels run on this device, for tensors of this dtype."""
    kernels = autograd.KERNELS.get(_kind(device))
    return kernels is not None and kernels.buffers_reason(device, dtype) is None


def is_eager(t: Tensor) -> bool:
    """Whether t is a plain tensor, or a parameter, in eager mode, not traced or fake."""
    return type(t) in (Tensor, Parameter) and not torch.compiler.is_compiling()


def supported_in_eager(t: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether t is in eager mode and the kernels support it; ``dtype`` is that of the values if t holds codes.

    For kernels of eager mode alone: a compiler fuses their reference with its neighbours.
    """
    return is_eager(t) and supported(t.device, dtype or t.dtype)


def launch(device: torch.device, name: str, reference: Callable[[], Any], *args: Any) -> Any:
    """Run the kernel ``"file.function"`` of `hotrain.kernels`, or its reference in plain PyTorch.

    The reference runs where there are no kernels, or where this one does not compile.
    """
    kernels = autograd.KERNELS.get(_kind(device))
    return reference() if kernels is None else kernels.run(name, reference, *args)


def opaque(
    schema: str, fake: Callable[..., Any], inlined: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: a custom operator that runs a kernel, and into which Inductor does not trace.

    Where Inductor would fuse the reference itself, it would read a tensor twice to quantize it, and load a scale for
    every element. ``fake`` makes its results for a tracer; ``inlined`` tells whether `kernel_nodes` may trace it, so
    that it allocates and launches, and does nothing else.
    """

    def define(implementation: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.partition("(")[0]
        if inlined:
            _implementations[name] = implementation
        _lib.define(schema)
        _lib.impl(name, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"hotrain::{name}", fake, lib=_lib)
        return implementation

    return define


def implementation(operator: Any) -> Callable[..., Any] | None:
    """The Python function of an opaque operator, None for any other target of a graph's node."""
    namespace, _, name = str(getattr(operator, "name", lambda: "")()).partition("::")
    return _implementations.get(name) if namespace == "hotrain" else None


def operator_for(t: Tensor, name: str) -> Callable[..., Any]:
    """The opaque operator of that name for t; its Python function where dispatch would change nothing."""
    if is_eager(t) and not dispatch_modes():
        return _implementations[name]
    return getattr(torch.ops.hotrain, name)  # type: ignore[no-any-return]

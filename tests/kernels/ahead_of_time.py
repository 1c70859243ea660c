"""Compiles the kernels for GPUs that are not here, in a process without Triton's interpreter; prints a line each.

python ahead_of_time.py 80 90      capability, kernel, bytes of shared memory
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hotrain.kernels import activation, attention, batch_norm, codes, gated, norm

TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "u8", torch.int32: "i32",
    torch.int64: "i64",
}  # fmt: skip
_launches: list[tuple[Any, tuple[Any, ...], dict[str, Any], dict[str, Any]]] = []


def _recorded(kernel: Any, _: int, __: Any, args: tuple[Any, ...], constants: dict[str, Any], **options: Any) -> None:
    _launches.append((kernel, args, constants, options))


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


def _compiled(capability: int, kernel: Any, args: tuple[Any, ...], constants: dict[str, Any], options: Any) -> Any:
    names = kernel.arg_names
    signature = {name: _type(value) for name, value in zip(names, args, strict=False)}
    signature |= dict.fromkeys(constants, "constexpr")
    whole = {(at,): [["tt.divisibility", 16]] for at, value in enumerate(args) if isinstance(value, torch.Tensor)}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, whole)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def calls() -> None:
    """The kernels of what is between the layers, at widths whose tiles differ most."""
    for rows, columns in ((256, 384), (64, 4096)):
        x, w = torch.empty(rows, columns, dtype=torch.bfloat16), torch.empty(columns)
        r, dtypes = torch.empty(rows), (torch.float32, torch.bfloat16)
        found = norm.forward(x.float(), x, w, w, 1e-5, dtypes, True, False, bias=w)
        norm.gradient(x, *found[3:], r, w, torch.float32, True, x.float(), torch.bfloat16)
        norm.pack(x, None, r, True)
        y, marks = activation.activate(x, "gelu", (-2, 11), w)
        activation.slope_gradient(y, marks, (-2, 11), 1.0, sums=True)
        for bits in (4, 8):
            codes.unpack(*codes.pack(x, 128, bits), bits, torch.bfloat16)
        gated.gradient(x, [*codes.pack(x, 128), *codes.pack(x, 128)], "silu")
    activation.bits_gradient(*activation.bits(x, "relu"))
    for channels in (64, 72, 2048):
        x, vector = torch.empty(512, channels, dtype=torch.bfloat16), torch.empty(channels)
        batch_norm.statistics(x)
        kept = batch_norm.normalize(x, vector, vector, vector, vector, x, "relu", None)
        for other in (None, x):
            batch_norm.gradient(kept[0], other, *kept[1:], vector, vector, "relu", None, True)
    heads = [torch.empty(64, 8, 64, dtype=torch.bfloat16) for _ in range(4)]
    attention.unpack(attention.pack(heads, 64, (8, 4)), (8, 4), torch.bfloat16)


if __name__ == "__main__":
    for module in (activation, attention, batch_norm, codes, gated, norm):
        module.launch = _recorded  # type: ignore[attr-defined]
    calls()
    for capability in map(int, sys.argv[1:]):
        for kernel, *rest in _launches:
            found = _compiled(capability, kernel, *rest)
            print(capability, f"{kernel.__module__}.{kernel.__name__}", found.metadata.shared, flush=True)

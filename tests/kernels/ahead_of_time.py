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

import hotrain
from hotrain.kernels import (
    activation,
    attention,
    backward,
    batch_norm,
    codes,
    dispatch,
    dropout,
    gated,
    gemm,
    head,
    lift,
    luq,
    noise,
    norm,
    picked_rows,
    pooling,
    quantize_kernels,
)
from hotrain.kernels.formats import Coded, Joined
from hotrain.transform.tokens import layout

TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "u8",
    torch.int8: "i8", torch.int32: "i32", torch.int64: "i64", torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}  # fmt: skip
_launches: list[tuple[Any, tuple[Any, ...], dict[str, Any], dict[str, Any]]] = []


def _recorded(
    kernel: Any, _: object, __: Any, args: tuple[Any, ...], constants: dict[str, Any], **options: Any
) -> None:
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
        norm.gradient(x, *found[3:5], r, found[5], torch.float32, True, x.float(), torch.bfloat16)
        for factor in (torch.empty(8), torch.empty(1, columns), torch.empty(rows * columns // 8, dtype=torch.uint8)):
            norm.forward(x.float(), x, w, w, 1e-5, dtypes, True, False, True, None, factor, 1.25)
            norm.gradient(x, *found[3:5], r, found[5], torch.float32, True, x.float(), torch.bfloat16, factor, 1.25)
        norm.pack(x, r, r, True, norm.channels(x, r, r, w))
        for bits in (4, 8):
            codes.unpack(*codes.pack(x, 128, bits), bits, torch.bfloat16)
            codes.pack(x, 128, bits, -5.0)
            y, *kept = codes.activate(x, "gelu", 128, bits, w, -5.0)
            codes.gradient(y, *kept, "gelu", bits, sums=True)
        halves = [(*codes.pack(x, 128, 8), None, None, False, "gelu", 8), (*codes.pack(x, 128),)]
        codes.make(halves, torch.bfloat16)
        gated.gradient(x, [*codes.pack(x, 128), *codes.pack(x, 128)], "silu")
    activation.bits_gradient(*activation.bits(x, "relu"))
    activation.bits_gradient(x, activation.flags(x > 0), 1.25)
    x = torch.empty(2, 64, 112, 112, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    window = [3, 3], [2, 2], [1, 1]
    pooling.max_pool_gradient(*pooling.max_pool(x, *window, False), x.shape, *window)
    for channels in (64, 72, 2048):
        x, vector = torch.empty(512, channels, dtype=torch.bfloat16), torch.empty(channels)
        batch_norm.statistics(x)
        kept = batch_norm.normalize(x, vector, vector, vector, vector, x, "relu", None)
        for other in (None, x):
            batch_norm.gradient(kept[0], other, *kept[1:], vector, vector, "relu", None, True)
        full = x.float()
        y, *kept = batch_norm.normalize(full, vector, vector, vector, vector, None, "", None, torch.bfloat16)
        batch_norm.gradient(y, None, *kept, vector, vector, "", None, False, torch.float32, full)
        for groups in (1, 8, channels):
            mean, r = batch_norm.statistics(x, 2, groups)
            y, *kept = batch_norm.normalize(x, mean, r, vector, vector, None, "silu", (-2, 10), torch.float32)
            batch_norm.gradient(x, None, *kept, r, vector, "silu", (-2, 10), False)
    heads = [torch.empty(4, 64, 8, 64, dtype=torch.bfloat16) for _ in range(4)]
    for count in (1, 2):
        middle = attention.middles(heads[1 : 1 + count])
        attention.unpack(attention.pack(heads, 64, (8, 4), middle), (8, 4), torch.bfloat16)


def layers(fp8: bool) -> None:
    """The kernels of layers: codes of x, g_y and w, for products of codes and for convolutions, and x restored."""
    place, key = torch.device("cpu"), torch.zeros((), dtype=torch.int64)
    history = dispatch._without_layer(place)
    for name in ("hq8", "hot-unbiased", "hla"):
        numbers = {"number": "e4m3" if fp8 else "int"} if name != "hla" else {}
        method = hotrain.preset(name, **numbers)
        rows = method.grad_weight
        lay = layout((8, 16, 16), 16, rows.rank, rows.sampled, "auto", None, True)
        x, g_y, w = (torch.empty(size, 64, dtype=torch.bfloat16) for size in (2048, 2048, 96))
        kept, side = dispatch.keep(x, method, lay, key, history)
        lift.lift(kept, side[:1], dispatch._rows(side), lay, 64, torch.bfloat16)
        own, one = torch.empty(2048, 1, 32, dtype=torch.uint8), torch.empty(2048, 1, 1, dtype=torch.bfloat16)
        coded = Coded(own, one, torch.empty(64), torch.empty(64), True, "", 4, torch.bfloat16)
        dispatch.keep(coded, method, lay, key, history)
        of_x = torch.empty(2048, 1, 64, dtype=torch.uint8)
        sloped = Coded(of_x, one, None, None, False, "gelu", 8, torch.bfloat16, g_y)
        for source in (g_y, sloped, Joined((g_y, g_y, g_y))):
            backward.grad_codes(source, (kept, side), method, lay, key, history, (True, True, True))
        if method.grad_input.bits is None:
            continue
        dispatch._weight_codes(w, method, key, history)
        _, rotated, projected, _ = dispatch._outputs(method)
        own = quantize_kernels.whole(2048, False)
        for output, rotates in (rotated, True), (projected._replace(across=projected.each), False):
            wide = output._replace(dtype=torch.bfloat16)
            quantize_kernels.compress(g_y, own, None, key, wide, rotate=rotates, history=history)
    method = hotrain.preset("hot-importance", number="e4m3" if fp8 else "int")  # x in int4, rows that are picked
    lay, w = layout((8, 16, 16), 16, 16, 0, "auto", None, True), torch.empty(64, 64, dtype=torch.bfloat16)
    kept = dispatch.keep(x, method, lay, key, history)
    backward.gradients(g_y, w, kept, method, lay, key, history, (True, True, True), columns=64)
    noise.hashes(key, 4096, 1, 0)
    dropout.mask(key, 4096, 0, 1 << 29)
    logits, of_rows = torch.empty(64, 5001, dtype=torch.bfloat16), torch.empty(64)
    head.normalizer(logits, logits.shape[1])
    labels = torch.empty(64, dtype=torch.int64)
    for other in (None, logits):
        head.gradient(logits, of_rows, labels, of_rows, other, 0, 4096)
    luq.luq(torch.empty(8, 64, 8, 8, dtype=torch.bfloat16), torch.empty(()), key, 1, torch.bfloat16)
    if not fp8:
        a, b = torch.empty(4096, 64, dtype=torch.int8), torch.empty(64, 4096, dtype=torch.int8)
        for left, right in ((a, a[:96]), (b, b)):  # the second in pieces of its sum
            gemm.int8_product(left, right, torch.empty(len(left)), torch.empty(()), torch.bfloat16)


if __name__ == "__main__":
    gemm.multiprocessors = lambda _: 108
    of_ours = (
        activation,
        attention,
        batch_norm,
        codes,
        dropout,
        gated,
        gemm,
        head,
        lift,
        luq,
        noise,
        norm,
        picked_rows,
        pooling,
        quantize_kernels,
    )
    for module in (*of_ours, sys.modules["hotrain.kernels.launch"]):
        module.launch = _recorded  # type: ignore[attr-defined]
    for capability in map(int, sys.argv[1:]):
        _launches.clear()
        # Not those of this machine: dependent launches are of compute capability 9 on.
        quantize_kernels.overlaps = lambda _, own=capability: own >= 90
        calls()
        layers(fp8=capability >= 89)
        for kernel, *rest in _launches:
            found = _compiled(capability, kernel, *rest)
            print(capability, f"{kernel.__module__}.{kernel.__name__}", found.metadata.shared, flush=True)

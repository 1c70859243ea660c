"""`hotrain bench ops`: kernels as a fraction of the GPU's copy bandwidth and matrix product rates of the same run.

`ceilings` measures these rates: a copy, and square products in bf16, fp8 and int8. `kernel_ops` lists the kernels that
are compared with them. To add a kernel, add an `Op`: how its inputs are made, how it is called, the bytes it must move,
the operations it must do, the ceiling that bounds it, and its error against the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotrain.method import GradInput, GradWeight, Method
from hotrain.saved import Format, values
from hotrain_bench import timing
from hotrain_bench.conditions import Clocks
from hotrain_bench.layers import (
    AGREEMENT,
    KEY,
    MODELS,
    Definition,
    Inputs,
    Path,
    Shape,
    Wrong,
    as_methods,
    path_of,
    relative,
    shapes,
)


@dataclass(frozen=True)
class Op:
    """A kernel call to time.

    Args:
        name: subject in the records, such as ``copy`` or ``vit_b/qkv/b128/keep``.
        variant: ``ceiling``, or the method.
        make: makes a set of inputs.
        run: computes on one set.
        bytes: bytes of memory read and written, each once.
        operations: multiplications and additions.
        ceiling: name of the rate that bounds it; None for a ceiling itself.
        error: relative error against the reference, at most `AGREEMENT`; None where there is nothing to check.
    """

    name: str
    variant: str
    make: Callable[[], Any]
    run: Callable[[Any], object]
    bytes: int
    operations: int = 0
    ceiling: str | None = None
    error: Callable[[], float] | None = None


def ceilings(device: torch.device, tiny: bool = False) -> list[Op]:
    """Return the ceilings: a copy of 1 GiB in bf16, and products of 8192³ in bf16, int8 and, on a GPU, fp8.

    Args:
        device: the device to measure on.
        tiny: 1 MiB and 64³ instead.
    """
    size, entries = (64, 1 << 19) if tiny else (8192, 1 << 29)

    def noise() -> tuple[Tensor, Tensor]:
        a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
        return a, torch.randn(size, size, device=device, dtype=torch.bfloat16)

    def codes() -> tuple[Tensor, Tensor]:
        a, b = (torch.randint(-127, 128, (size, size), device=device, dtype=torch.int8) for _ in range(2))
        return a, b.t()

    def small_floats() -> tuple[Tensor, Tensor]:
        a, b = noise()
        return a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()

    one = torch.ones((), device=device)

    def fp8(pair: tuple[Tensor, Tensor], fast: bool) -> Tensor:
        return torch._scaled_mm(*pair, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

    def buffers() -> tuple[Tensor, Tensor]:
        source = torch.randn(entries, device=device, dtype=torch.bfloat16)
        return source, torch.empty_like(source)

    work = 2 * size**3
    found = [
        # By a kernel: PyTorch's own copy, in a graph, uses the copy engine, at two thirds of the rate on an H200.
        Op("copy", "ceiling", buffers, lambda pair: torch.neg(pair[0], out=pair[1]), 4 * entries),
        Op("bf16", "ceiling", noise, lambda pair: pair[0] @ pair[1], 6 * size**2, work),
        Op("int8", "ceiling", codes, lambda pair: torch._int_mm(*pair), 6 * size**2, work),
    ]
    if device.type == "cuda":
        found.append(Op("fp8", "ceiling", small_floats, lambda pair: fp8(pair, False), 4 * size**2, work))
        found.append(Op("fp8 fast", "ceiling", small_floats, lambda pair: fp8(pair, True), 4 * size**2, work))
    return found


def code_bytes(bits: int | None) -> int:
    """Return the bytes per element as the kernels write it: 1 for a code, 2 for bf16."""
    return 2 if bits is None else 1


def kernel_ops(shape: Shape, label: str, method: Method, device: torch.device) -> list[Op]:
    """Return the kernel calls of one layer: pack, quantization of g_y and w, and each gradient."""
    path = path_of(shape, method, device)
    lay = shape.layout(method)
    t, o, i = shape.tokens, shape.outputs, shape.inputs
    kept_bytes = Format(method.saved, i, torch.bfloat16).nbytes(lay.rows)

    def fresh() -> Inputs:
        return Inputs.of(shape, device)

    def with_kept() -> tuple[Inputs, tuple[Tensor, ...]]:
        s = fresh()
        return s, path.keep(s)

    def gradients(*needs: bool) -> Callable[[Any], object]:
        x, w, b = needs
        return lambda made: path.gradients(made[0], made[1], (x, w, b))

    def of_gradient(place: int) -> Callable[[], float]:
        needs = (place == 0, place == 1, False)

        def error() -> float:
            s = fresh()
            definition = Definition(shape, method, KEY)
            got = path.gradients(s, path.keep(s), needs)[place]
            want = definition.gradients(s, definition.keep(s), needs)[place]
            assert got is not None
            assert want is not None
            return relative(got, want)

        return error

    # x is read in bf16 and its codes written; g_y is read, its codes written and read again, w likewise; g is written.
    return [
        Op(
            f"{shape.subject}/keep",
            label,
            fresh,
            path.keep,
            2 * t * i + kept_bytes,
            ceiling="copy",
            error=lambda: save_error(shape, method, path, fresh()),
        ),
        Op(
            f"{shape.subject}/g_y",
            label,
            with_kept,
            lambda made: path.grad_codes(made[0], made[1]),
            2 * t * o + code_bytes(method.grad_input.bits) * t * o + code_bytes(method.grad_weight.bits) * lay.rows * o,
            ceiling="copy",
        ),
        Op(
            f"{shape.subject}/w",
            label,
            fresh,
            path.weight_codes,
            2 * o * i + code_bytes(method.grad_input.bits) * o * i,
            ceiling="copy",
        ),
        Op(
            f"{shape.subject}/g_x",
            label,
            with_kept,
            gradients(True, False, False),
            4 * t * o + 4 * o * i + 2 * t * i,
            2 * t * o * i,
            product_of(method.grad_input),
            of_gradient(0),
        ),
        Op(
            f"{shape.subject}/g_w",
            label,
            with_kept,
            gradients(False, True, False),
            2 * t * o + 2 * lay.rows * o + kept_bytes + 2 * o * i,
            2 * lay.rows * o * i,
            product_of(method.grad_weight),
            of_gradient(1),
        ),
    ]


def product_of(path: GradInput | GradWeight) -> str:
    """Return the name of the ceiling of a gradient's product: bf16 where nothing is quantized."""
    if path.bits is None:
        return "bf16"
    return "fp8" if path.number in ("e4m3", "e5m2") else "int8"


def save_error(shape: Shape, method: Method, path: Path, s: Inputs) -> float:
    """Return the relative error of the saved P x against the reference, dequantized; kernels save it as (I, R')."""
    definition = Definition(shape, method, KEY)
    wanted = values(definition.restored(s, definition.keep(s)), torch.float32)
    saved = path.keep(s)
    if isinstance(path, Definition):
        return relative(values(path.restored(s, saved), torch.float32), wanted)
    codes, side = saved
    return relative(codes[: wanted.shape[1], : len(wanted)].T.float() * side.flatten()[0], wanted)


def measure(
    ops: Sequence[Op], device: torch.device, repeats: int, clock: timing.Clock | None = None
) -> tuple[dict[str, timing.Times], dict[str, str] | None]:
    """Time each op, in a CUDA graph over enough sets of inputs to miss the cache.

    Args:
        ops: the ops.
        device: the device to measure on.
        repeats: timed repeats of each op.
        clock: overrides the device's clock.

    Returns:
        Times by name and variant, and the GPU's clocks during the bf16 product.
    """
    clock = clock or timing.clock_of(device)
    times: dict[str, timing.Times] = {}
    asked: list[Clocks] = []
    for op in ops:
        sets = [op.make() for _ in range(timing.sets_past_cache(op.bytes, device))]
        work = timing.over(sets, op.run)
        work = timing.in_graph(work) if device.type == "cuda" else work
        halfway = (lambda: asked.append(Clocks(device))) if op.name == "bf16" else None
        times[f"{op.name} {op.variant}"] = timing.interleaved({"": work}, repeats, clock, len(sets), halfway)[""]
    return times, asked[0].read() if asked else None


def rows(ops: Sequence[Op], times: Mapping[str, timing.Times]) -> Iterator[dict[str, Any]]:
    """Yield one record per op: its rates, and its share of the ceiling of the same run."""
    rates: dict[str, float] = {}
    for op in ops:
        if op.ceiling is None:
            seconds = times[f"{op.name} {op.variant}"].median_ms / 1e3
            rates[op.name] = (op.operations or op.bytes) / seconds
    for op in ops:
        measured = times[f"{op.name} {op.variant}"]
        seconds = measured.median_ms / 1e3
        amount = op.bytes if op.ceiling == "copy" else op.operations
        bound = rates.get(op.ceiling or "")
        yield {
            "bench": "ops",
            "subject": op.name,
            "variant": op.variant,
            "median_ms": measured.median_ms,
            "spread_ms": measured.spread_ms,
            "peak_bytes": None,
            "activation_bytes": None,
            "bytes": op.bytes,
            "operations": op.operations,
            "tb_s": op.bytes / seconds / 1e12,
            "tflop_s": op.operations / seconds / 1e12,
            "ceiling": op.ceiling,
            "share": None if bound is None else amount / seconds / bound,
        }


def run(
    methods: Sequence[str], batch: int, device: torch.device, repeats: int, tiny: bool = False
) -> Iterator[dict[str, Any]]:
    """Check the kernels, then time them and the ceilings on the layers of `hotrain_bench.layers`.

    Args:
        methods: methods as on the command line.
        batch: images of the ViT-B layers.
        device: the device to measure on.
        repeats: timed repeats of each op.
        tiny: small shapes, to test the code.

    Yields:
        One record per op.

    Raises:
        Wrong: a kernel differs from the reference; before anything is timed.
    """
    torch.manual_seed(0)
    table = ceilings(device, tiny)
    for label, method in as_methods(methods).items():
        for shape in shapes(MODELS, batch, tiny):
            table += kernel_ops(shape, label, method, device)
    for op in table:
        if op.error is not None and not (found := op.error()) <= AGREEMENT:
            raise Wrong(
                f"{op.name} {op.variant}: {found:.4f} away from the reference, allowed is {AGREEMENT}; no times"
            )
    times, clocks = measure(table, device, repeats)
    for row in rows(table, times):
        yield row | {"tiny": tiny, "clocks": clocks}

"""Host time of one converted layer, by kernel launch; for the "Laboratory notes" of `docs/kernels.md`.

    python benchmarks/host.py [--tokens 25216] [--outputs 768] [--inputs 768]

For a Linear in fp8 on a GPU: host time of forward and backward, of each launch, and of possible replacements of
`hotrain.kernels.launch.launch`, each checked to give the same gradients.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import hotrain
from hotrain import autograd
from hotrain.kernels import launch, quantize_kernels, rows
from hotrain.layer import Config


def host_us(work: Callable[[], object], repeats: int = 50) -> float:
    """Return the microseconds that the host needs to issue the work, without waiting for the GPU."""
    work()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(repeats // 5):
            work()
        best = min(best, (time.perf_counter() - began) / (repeats // 5))
        torch.cuda.synchronize()
    return best * 1e6


def as_numbers(args: tuple[Any, ...]) -> list[Any]:
    """Replace tensors by their addresses."""
    return [a.data_ptr() if isinstance(a, Tensor) else a for a in args]


def by_getitem(compiled: Any, programs: int, args: tuple[Any, ...], tail: tuple[Any, ...]) -> None:
    """Launch by ``kernel[grid]``."""
    compiled[(programs, 1, 1)](*args, *tail)


def by_getitem_with_numbers(compiled: Any, programs: int, args: tuple[Any, ...], tail: tuple[Any, ...]) -> None:
    """Launch by ``kernel[grid]`` with addresses."""
    compiled[(programs, 1, 1)](*as_numbers(args), *tail)


def by_run(compiled: Any, programs: int, args: tuple[Any, ...], tail: tuple[Any, ...]) -> None:
    """Launch by the compiled kernel's ``run`` with addresses."""
    stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
    compiled.run(
        programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *as_numbers(args), *tail
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    for name, default in (("tokens", 25216), ("outputs", 768), ("inputs", 768)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    x = torch.randn(args.tokens, args.inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(args.outputs, args.inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    call = autograd.call_of(Config(hotrain.preset("hot-unbiased", number="e4m3")), x)
    g = torch.randn(args.tokens, args.outputs, device="cuda", dtype=torch.bfloat16)

    def layer() -> tuple[Tensor, ...]:
        return torch.autograd.grad(autograd.apply(x, w, None, call, 1), (x, w), g)

    def exact() -> tuple[Tensor, ...]:
        return torch.autograd.grad(torch.nn.functional.linear(x, w), (x, w), g)

    print(f"exact, forward and backward: {host_us(exact):7.1f} µs of the host")
    print(f"converted:                   {host_us(layer):7.1f} µs")
    want = [t.clone() for t in layer()]
    original = launch.launch
    for way in (by_getitem, by_getitem_with_numbers, by_run):

        def launched(
            kernel: Any, programs: int, case: Any, args: tuple[Any, ...], constants: Any, way: Any = way, **options: Any
        ) -> None:
            found = launch._compiled.get((kernel.__name__, case))
            if found is None:
                original(kernel, programs, case, args, constants, **options)
            else:
                way(found[0], programs, args, found[1])

        quantize_kernels.launch = rows.launch = launched  # type: ignore[assignment]
        try:
            same = all(torch.equal(a, b) for a, b in zip(layer(), want, strict=True))
            print(
                f"  {way.__name__:26} {host_us(layer):7.1f} µs, {'the same gradients' if same else 'OTHER GRADIENTS'}"
            )
        except (TypeError, RuntimeError) as error:
            print(f"  {way.__name__:26} {type(error).__name__}: {error}")
    quantize_kernels.launch = rows.launch = lambda *_, **__: None  # type: ignore[assignment]
    print(f"  without any launch         {host_us(layer):7.1f} µs")
    quantize_kernels.launch = rows.launch = original
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(50):
        layer()
    profile.disable()
    torch.cuda.synchronize()
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()

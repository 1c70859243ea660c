"""Script: compile for a GPU what Inductor makes of every operator's case, forward and backward, without a GPU.

What is no kernel of ours is one that Inductor writes, in Triton for a GPU and in C++ for a CPU: what Triton refuses is
only seen there. Here Inductor writes Triton for tensors of the CPU, and Triton compiles it for sm_90. Inputs are
transposed, as behind a patch embedding, so that nearly all is Inductor's. Nothing runs.

``python tests/compress/inductors_kernels.py PART PARTS`` compiles every PARTS-th case and prints a line a kernel;
without arguments, a norm behind a transposed sum, whose kernels are nodes: a line a kernel, and one a copy for them;
with "padded", a line for each tensor that such nodes read or write where Inductor pads what it writes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
import triton
from operator_cases import CASES, transposed, with_operators
from torch import Tensor, nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.ir import ExternKernel, IRNode, UserDefinedTritonKernel
from torch.nn import functional as F
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import hotrain
from hotrain import autograd, kernels
from hotrain.compress import sharing
from hotrain.compress.operators import base
from hotrain.kernels import launch, support

TARGET = GPUTarget("cuda", 90, 32)


class Driver:
    """Of a device that is not here, as far as Inductor asks."""

    def get_current_target(self) -> GPUTarget:
        return TARGET


class Ran(Exception):
    """A kernel was to run."""


class Kernel:
    def run(self, *args: Any, **kwargs: Any) -> None:
        raise Ran


@contextmanager
def collected() -> Iterator[dict[str, str]]:
    """The sources of the kernels that are compiled inside, by name."""
    sources: dict[str, str] = {}

    def note(self: Any, name: str, source: str, *args: Any, **kwargs: Any) -> Kernel:
        sources[name] = source
        return Kernel()

    before = AsyncCompile.triton
    AsyncCompile.triton = note  # type: ignore[method-assign]
    try:
        yield sources
    finally:
        AsyncCompile.triton = before  # type: ignore[method-assign]


def compiled(name: str, source: str) -> None:
    """Compile a kernel as Inductor writes it, in the first of its configurations."""
    kernel: Any = getattr(PyCodeCache.load(source), name)
    config, names = kernel.configs[0], kernel.fn.arg_names
    constants = {**kernel.triton_meta["constants"], **config.kwargs}
    signature = {each: "constexpr" if each in constants else kernel.triton_meta["signature"][each] for each in names}
    places = {(names.index(each),): value for each, value in constants.items()}
    triton.compile(ASTSource(kernel.fn, signature, places, {}), target=TARGET, options={"num_warps": config.num_warps})


def set_up() -> None:
    sharing.SMALL = base.SMALL = 2
    triton.runtime.driver.set_active(Driver())
    torch._inductor.config.cpu_backend = "triton"
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    torch._functorch.config.force_non_lazy_backward_lowering = True


def with_nodes() -> None:
    """Kernels of ours become nodes of a graph, as in plain `torch.compile` on a GPU."""
    kernels.inlines = launch.inlines = lambda _: True  # type: ignore[assignment]
    support._off_or_unsupported = lambda _: None  # type: ignore[assignment]
    autograd.KERNELS.update(cpu=kernels)


def nodes() -> None:
    with_nodes()
    copy = ExternKernel.copy_input

    def copied(x: Any) -> Any:
        print("copy", *x.get_size(), sep="\t")
        return copy(x)

    ExternKernel.copy_input = staticmethod(copied)  # type: ignore[method-assign]
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128))
    hotrain.convert(model, "exact", memory="block")
    image = torch.randn(8, 32, 32, 64, requires_grad=True).permute(0, 3, 1, 2)
    with collected() as sources, suppress(Ran):
        torch.compile(lambda t: model((t.sin() + t).permute(0, 2, 3, 1)), fullgraph=True)(image)
    for kernel, source in sources.items():
        compiled(kernel, source)
        print("kernel", kernel, sep="\t")


class KeptTwice(nn.Module):
    """A layer's input that backward needs exactly, too: forward saves it, and backward packs it for the layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, width), nn.Linear(width, 128)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).sin()
        return self.second(x).sum() + x.cumprod(-1).sum()


def padded() -> None:
    """A saved tensor whose rows Inductor pads on a GPU, from 1100 elements to 1152, and which kernels read."""
    with_nodes()
    torch._inductor.config.disable_padding_cpu = False
    begin = UserDefinedTritonKernel.__init__

    def began(self: Any, **given: Any) -> None:
        begin(self, **given)
        for name, t in self.kwargs.items():
            if isinstance(t, IRNode):
                print("argument", name, *t.get_size(), "strides", *t.get_stride(), sep="\t")

    UserDefinedTritonKernel.__init__ = began  # type: ignore[method-assign]
    model = KeptTwice(1100)
    hotrain.convert(model, "exact", memory="block")
    with collected(), suppress(Ran), torch.autocast("cpu", torch.bfloat16):
        torch.compile(model, fullgraph=True)(torch.randn(32, 64, 64))


def main(part: int, parts: int) -> None:
    for name in list(CASES)[part::parts]:
        given = [transposed(t) for t in CASES[name].inputs()]
        w = torch.randn(5, CASES[name].call(*given).shape[-1], requires_grad=True)
        torch._dynamo.reset()

        def behind(w: Tensor, *t: Tensor, call: Callable[..., Tensor] = CASES[name].call) -> Tensor:
            return F.linear(call(*t), w)

        with collected() as sources, suppress(Ran):
            with_operators(torch.compile(behind, fullgraph=True), w, *given)
        for kernel, source in sources.items():
            compiled(kernel, source)
            print(name, kernel, sep="\t")


if __name__ == "__main__":
    set_up()
    if sys.argv[1:] == ["padded"]:
        padded()
    else:
        main(int(sys.argv[1]), int(sys.argv[2])) if sys.argv[1:] else nodes()

"""Measures whether a layer is faster converted on its GPU: its training step exact and converted, once per shape.

A roofline comes first, of bytes and operations: where even the least time of the method exceeds the least of exact, as
in the 1×1 convolutions of narrow networks, nothing is compiled and measured.

`convert(plan="speed")` calls `verdict` at a layer's first training forward on a GPU; slower layers stay exact, and the
report states both times. They include launch overhead; ``plan="graphs"`` measures the GPU alone, as in a CUDA graph.
Without a graph a layer stays exact, too, where the host needs long to issue it: a whole step would wait for the host.
On a CPU nothing is measured; `hotrain.plan` measures a whole model there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import autograd
from .casting import autocast
from .geometry import FEW, Geometry, rows_of_patches
from .layer import Config
from .method import Method
from .private import default_store
from .transform.tokens import Grid

PATCHES = "patches"  # in the place of a layer's configuration: an exact one, as a product of its patches
_ROUNDS, _MOST_ROUNDS = 5, 40
_SAME = 1.02  # the ratio of two times that count as equal
_TRUST = 0.5  # in what layers gain: alone on the device they gain more than in a step
_HOPELESS = 3.0  # times slower in the first rounds: not worth the others
_ISSUING = 0.5  # of exact's time: the most that the host may need to issue a converted layer without a CUDA graph

_roofs: dict[torch.device, Roofs] = {}
_times: dict[tuple[Question, bool], tuple[float, float, float] | None] = {}
_of_patches: dict[Question, tuple[float, float] | None] = {}
_rehearsed: set[Question] = set()


def agreed(key: str, own: Any) -> Any:
    """What all processes of a distributed run use for a measurement: the first result that one of them has posted.

    Two GPUs measure two times, and from them would make two plans. No process waits for another, so that a layer that
    only some of them run is no deadlock. The key is equal on all processes; `own` is this one's result, of JSON's
    types, of which a list comes back as a tuple.
    """
    store = default_store()
    if store is None:
        return own
    found = json.loads(store.compare_set(f"hotrain {key}", "", json.dumps(own)))
    return tuple(found) if isinstance(found, list) else found


@dataclass(frozen=True)
class Question:
    """All that the time of a layer's training step depends on.

    Attributes:
        x: shape of the input.
        w: shape of the weight.
        dtype: of the product.
        weights: dtype of the parameters.
        bias: whether there is one.
        needs_x: whether x requires a gradient.
        trained: whether the weight does.
        method: that the layer would follow.
        grid: of its tokens, where known.
        transposed: whether the weight is (I, O), as in transformers' Conv1D.
        geometry: of a convolution, None for a Linear.
        device: a GPU.
        trains_bias: whether the bias requires a gradient.
        last: whether an image is in channels_last.
    """

    x: tuple[int, ...]
    w: tuple[int, ...]
    dtype: torch.dtype
    weights: torch.dtype
    bias: bool
    needs_x: bool
    trained: bool
    method: Method
    grid: Grid | None
    transposed: bool
    geometry: Geometry | None
    device: torch.device
    trains_bias: bool = True
    last: bool = True

    @property
    def columns(self) -> int:
        """Inputs of the product: of a convolution, entries of a patch."""
        return self.w[0 if self.transposed else 1] if self.geometry is None else math.prod(self.w[1:])

    @property
    def outputs(self) -> int:
        return self.w[1 if self.transposed else 0]

    @property
    def multiplies(self) -> bool:
        """Whether compiled code computes the exact layer as a product of patches (`geometry.is_multiplied`)."""
        cuts = self.geometry is not None and self.geometry.cuts and self.trained and not self.needs_x
        return cuts and self.x[1] < FEW and self.dtype.itemsize == 2

    @property
    def key(self) -> str:
        """The question in words, the same on every rank: each has a GPU of its own."""
        return repr(dataclasses.replace(self, device=torch.device(self.device.type)))


@dataclass(frozen=True)
class Roofs:
    """The roofline of a device, measured. 8-bit products are assumed to be twice as fast as 16-bit ones.

    Attributes:
        copy: bytes/s of a copy, read and written.
        product: FLOP/s of bfloat16 products.
    """

    copy: float
    product: float

    @classmethod
    def of(cls, device: torch.device) -> Roofs | None:
        """Measured once per process; None within CUDA graph capture, and where memory does not suffice."""
        if device not in _roofs:
            if torch.cuda.is_current_stream_capturing():
                return None
            try:
                own = cls._measured(device)
            except torch.OutOfMemoryError:
                return None
            _roofs[device] = cls(*agreed("roofs", (own.copy, own.product)))
        return _roofs[device]

    @classmethod
    def _measured(cls, device: torch.device) -> Roofs:
        size = 4096
        # Random: products of equal numbers take less power, and run faster than those of real data.
        own = torch.Generator(device).manual_seed(0)
        a = torch.randn(size, size, device=device, dtype=torch.bfloat16, generator=own)
        b, long = torch.empty_like(a), torch.randint(256, (1 << 28,), device=device, dtype=torch.uint8, generator=own)
        other = torch.empty_like(long)
        works: list[Callable[[], object]] = [lambda: other.copy_(long), lambda: torch.mm(a, a, out=b)]
        copying, multiplying = fastest(works, count=4)
        return cls(2 * long.nbytes / (copying * 1e-3), 2 * size**3 / (multiplying * 1e-3))


def least(question: Question, roofs: Roofs) -> tuple[float, float] | None:
    """Least time of backward and of saving x in 16 bits, by the roofline.

    Every operand is read once and every result written once, at the rate of a copy, or the operations at the rate of
    products, whichever takes longer. Quantizing the weight is left out.

    Returns:
        (exact, by the method), ms; None for a method without codes on both paths.
    """
    q, method = question, question.method
    if q.geometry is not None and not q.geometry.is_patches:
        return None
    if not (method.grad_input.bits and method.grad_weight.bits and method.saved.bits):
        return None
    tokens, columns = math.prod(q.x) // q.columns, q.columns  # patches that do not overlap
    ins, outs, size = tokens * columns, tokens * q.outputs, q.dtype.itemsize
    operations = 2.0 * tokens * columns * q.outputs
    rows = method.grad_weight.rank / method.grad_weight.tile * method.grad_weight.share

    def product(operations: float, rate: float, nbytes: float) -> float:
        return max(operations / rate, nbytes / roofs.copy)

    one = product(operations, roofs.product, (ins + outs) * size)
    exact = one * (q.trained + q.needs_x)
    codes = outs * size + outs * q.needs_x + q.trained * (ins * size + rows * (ins + outs))
    converted = codes / roofs.copy + q.needs_x * product(operations, 2 * roofs.product, outs + ins * size)
    converted += q.trained * product(rows * operations, 2 * roofs.product, rows * (ins + outs))
    return exact * 1e3, converted * 1e3


def times(question: Question, graphs: bool = False) -> tuple[float, float, float] | None:
    """Times of forward and backward, measured once per process and question, on random data.

    Args:
        question: the layer.
        graphs: whether to time the GPU alone, from replays of CUDA graphs.

    Returns:
        (exact, by the method, of the host to issue the latter: 0 for graphs), ms; None within CUDA graph capture, and
        where memory does not suffice for a second set of tensors.
    """

    def measure() -> tuple[float, float, float]:
        own = _measure(question, graphs)
        _rehearsed.add(question)
        return own

    return _once(_times, (question, graphs), f"layer {question.key} {graphs}", measure)


def _once(found: dict[Any, Any], place: Any, name: str, measure: Callable[[], Any]) -> Any:
    """What `measure` returned for a place, once per process, or to rank 0 under that name (`agreed`); None within CUDA
    graph capture, and where memory does not suffice."""
    if place not in found:
        if torch.cuda.is_current_stream_capturing():
            return None
        try:
            own = measure()
        except torch.OutOfMemoryError:
            own = None
        found[place] = agreed(name, own)
    return found[place]


def gain(question: Question, graphs: bool = False) -> float:
    """ms of a step by which the layer is taken to be faster converted, if that was measured; else 0."""
    found = _times.get((question, graphs))
    if found is None:
        return 0.0
    ms = found[0] - found[1]
    return ms if ms < 0 or question.multiplies else _TRUST * ms


def times_of_patches(question: Question) -> tuple[float, float] | None:
    """Times of forward and backward of an exact layer that cuts patches, measured as `times` are.

    Returns:
        (as a convolution, by `geometry.product_of_patches` with the copies that cut x), ms of the GPU; None for other
        layers, within CUDA graph capture, and where memory does not suffice.
    """
    if not question.multiplies:
        return None
    return _once(_of_patches, question, f"patches {question.key}", lambda: _measure_patches(question))


def gain_of_patches(question: Question) -> float:
    """ms of a compiled step by which an exact layer's patches are faster as a product, if that was measured; else 0."""
    found = _of_patches.get(question)
    return 0.0 if found is None else max(found[0] - found[1], 0.0)


def verdict(question: Question, graphs: bool = False, unpacks: bool = False) -> str | None:
    """Why the layer stays exact, with the two times; None where it is faster converted, or equal and saves memory.

    Args:
        question: the layer.
        graphs: as of `times`.
        unpacks: whether an exact layer would unpack x, which was saved in codes, for its g_w.
    """
    roofs = Roofs.of(question.device) if question.dtype.itemsize == 2 else None
    bounds = None if roofs is None else least(question, roofs)
    spared = 0.0 if roofs is None or not unpacks else _unpacking(question, roofs)
    if bounds is not None and bounds[1] >= bounds[0] + spared:
        return (
            f"too few operations per byte: on this GPU backward takes {bounds[1]:.3f} ms at least, exact "
            f"{bounds[0] + spared:.3f} ms at least; plan='memory' converts it"
        )
    found = times(question, graphs)
    if found is None:
        return None
    exact, converted, host = found
    if converted > (1.0 if unpacks else _SAME) * (exact + spared):
        return (
            f"slower on this GPU: {converted:.3f} ms/step, exact {exact + spared:.3f} ms/step; plan='memory' converts "
            "it"
        )
    if host > _ISSUING * exact:
        # A step has other work for the host. Where the GPU waits for it, what the layer gains is lost twice.
        return (
            f"the host takes {host:.3f} ms to issue it, exact {exact:.3f} ms/step in all; hotrain.compile trains it as "
            "CUDA graphs, and plan='memory' converts it"
        )
    return None


def _unpacking(question: Question, roofs: Roofs) -> float:
    """Least ms of reading the codes of x and writing x, where it counts.

    Where both x and y fit the cache, exact products read there what was just written, and all that a converted layer
    reads and writes besides costs more than this spares (XCiT-S, Twins-S and PVTv2-B2, on an H200).
    """
    q = question
    tokens, on_gpu = math.prod(q.x) // q.columns, q.device.type == "cuda"
    smaller = tokens * min(q.columns, q.outputs) * q.dtype.itemsize
    cache = torch.cuda.get_device_properties(q.device).L2_cache_size if on_gpu else 0
    return 1e3 * math.prod(q.x) * (1 + q.dtype.itemsize) / roofs.copy if 2 * smaller > cache else 0.0


def rehearse(question: Question) -> None:
    """Run a layer's step once, so that its kernels are compiled and their lookup tensors allocated.

    CUDA graphs need it: a tensor that is made while a graph warms up, and kept, would be in the graph's memory pool.
    """
    if question not in _rehearsed and not torch.cuda.is_current_stream_capturing():
        _rehearsed.add(question)
        with contextlib.suppress(torch.OutOfMemoryError):
            layer = _Layer(question)
            layer.prepare()
            with layer.mode():
                layer.run(layer.converted)


class _Layer:
    """One layer on random data, exact and converted; `compiled`: with the forward of compiled code."""

    def __init__(self, q: Question, compiled: bool = False) -> None:
        with torch.random.fork_rng([q.device] if q.device.type == "cuda" else [], device_type="cuda"):
            x = self._noise(q, q.x, q.dtype)
            if q.geometry is not None and (q.last or not q.multiplies):  # compiled, others are laid out so
                x = x.to(memory_format=torch.channels_last)
            self.x = x.requires_grad_(q.needs_x)
            self.w = self._noise(q, q.w, q.weights).requires_grad_(q.trained)
            self.b = self._noise(q, (q.outputs,), q.weights).requires_grad_(q.trains_bias) if q.bias else None
            self.q, config = q, Config(q.method, q.grid, q.transposed, q.geometry, name="planned")
            with self.mode():
                self.call = dataclasses.replace(autograd.call_of(config, self.x), compiled=compiled)
                self.g = torch.randn_like(self.exact())

    @staticmethod
    def _noise(q: Question, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, device=q.device, dtype=torch.float32).to(dtype)

    def mode(self) -> contextlib.ExitStack:
        """Gradients on, and autocast where the parameters are kept in another dtype."""
        stack = contextlib.ExitStack()
        stack.enter_context(torch.enable_grad())
        cast = self.q.dtype != self.q.weights
        stack.enter_context(torch.autocast(self.q.device.type, self.q.dtype, enabled=cast))
        return stack

    def prepare(self) -> None:
        """What the layer needs, besides, in a compiled step, where it is in front of an activation function."""
        config, q = self.call.config, self.q
        if config.kernels and not config.overlaps:
            autograd.KERNELS[q.device.type].prepare_codes(self.call.layout, q.dtype, q.device, q.trained)

    def exact(self) -> Tensor:
        if self.q.geometry is not None:
            b = None if self.b is None else autocast(self.b)
            return self.q.geometry.forward(autocast(self.x), autocast(self.w), b)
        return F.linear(self.x, self.w.T if self.q.transposed else self.w, self.b)

    def patches(self) -> tuple[Callable[[], Sequence[Tensor]], Callable[[], Sequence[Tensor]]]:
        """The step of an exact layer that cuts patches: as a convolution, and as its products.

        Without what a compiler fuses with its neighbours: the bias, the cuts, and the copy of the result.
        """
        assert self.q.geometry is not None
        geometry, x = self.q.geometry, autocast(self.x)
        rows = rows_of_patches(x, self.w.shape[2:]).flatten(0, -2)
        g = self.g.movedim(1, -1).reshape(len(rows), -1)

        def convolution() -> Sequence[Tensor]:
            return torch.autograd.grad(geometry.forward(x, autocast(self.w), None), self.w, self.g)

        def product() -> Sequence[Tensor]:
            return torch.autograd.grad(F.linear(rows, autocast(self.w).flatten(1)), self.w, g)

        return convolution, product

    def converted(self) -> Tensor:
        return autograd.apply(self.x, self.w, self.b, self.call, 1)

    def run(self, forward: Callable[[], Tensor], bias: bool = True) -> None:
        """Forward and backward, with the bias' gradient or without."""
        wanted = [t for t in (self.x, self.w, self.b if bias else None) if t is not None and t.requires_grad]
        torch.autograd.grad(forward(), wanted, self.g)


def timed(work: Callable[[], object], count: int = 2) -> float:
    """Milliseconds of the GPU for one call, of `count`."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def fastest(works: Sequence[Callable[[], object]], rounds: int = _MOST_ROUNDS, count: int = 2) -> tuple[float, ...]:
    """Milliseconds of the GPU for one call of each work, in turns: the fastest, as other work can only slow it down.

    Another process on the GPU slows some rounds down and not others. So there are more of them until the two fastest
    of each work agree.

    Args:
        works: what is timed.
        rounds: at most.
        count: calls in a round.
    """
    times: list[list[float]] = [[] for _ in works]
    for number in range(rounds):
        if number >= _ROUNDS and all(one[1] <= _SAME * one[0] for one in times):
            break
        for work, own in zip(works, times, strict=True):
            own.append(timed(work, count))
            own.sort()
    return tuple(one[0] for one in times)


def clock(device: torch.device) -> float:
    """The time in seconds when all that was issued to a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _measure(question: Question, graphs: bool) -> tuple[float, float, float]:
    layer = _Layer(question, compiled=graphs)
    layer.prepare()
    # The compiler sums g_y for the bias where it reads or writes it: that takes a read of g_y at most. PyTorch's own
    # sum takes up to a third of an exact layer of few channels (144 outputs of 186,880 tokens, on an H200).
    roofs = Roofs.of(question.device) if graphs and layer.b is not None and layer.b.requires_grad else None
    summing = 0.0 if roofs is None else 1e3 * layer.g.nbytes / roofs.copy
    with layer.mode():
        works: list[Callable[[], object]] = [
            lambda: layer.run(layer.exact, bias=roofs is None),
            lambda: layer.run(layer.converted),
        ]
        for work in works:
            work()  # compiles, and finds the scales
            work()
        if graphs:
            works = [captured(work) for work in works]
        exact, converted = fastest(works, rounds=2)
        if converted > _HOPELESS * exact:
            return exact + summing, converted, 0.0
        exact, converted = fastest(works)
        host = 0.0 if graphs else statistics.median(_issued(works[1]) for _ in range(_ROUNDS))
    return exact + summing, converted, host


def _measure_patches(question: Question) -> tuple[float, ...] | None:
    roofs = Roofs.of(question.device)
    if roofs is None:
        return None
    layer = _Layer(question)
    with layer.mode():
        works = layer.patches()
        for work in works:
            work()
        convolved, multiplied = fastest([captured(work) for work in works])
    return convolved, multiplied + 2e3 * layer.x.nbytes / roofs.copy  # the cuts


def _issued(work: Callable[[], object]) -> float:
    """Milliseconds of the host to issue the work, while the GPU is idle at first."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def captured(work: Callable[[], object]) -> Callable[[], object]:
    """The work as a CUDA graph's replay; unchanged where it cannot be captured (the reference reads its key)."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
    except RuntimeError:
        return work
    return graph.replay

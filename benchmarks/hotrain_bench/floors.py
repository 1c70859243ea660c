"""What a training step must compute and move at least: operations of its products, bytes between them.

The exact step of a model runs on fake tensors, and every operator of PyTorch in it is counted. Products (matrix
products, convolutions, attention) read and write each of their tensors once. Everything between two products is one
pass: what it makes for itself costs nothing, what it reads from before or leaves for later costs its bytes once. A
statistic over all rows of a tensor (batch norm) ends a pass. Nothing is counted of random masks, which a compiler draws
again, nor of what is only a number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from hotrain_bench.tasks import build

_aten = torch.ops.aten
_ATTENTION = (
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward,
)
_CONVOLUTIONS = (_aten.convolution, _aten.convolution_backward)
_STATISTICS = (_aten.native_batch_norm, _aten.native_batch_norm_backward, _aten._native_batch_norm_legit)
_GATHERS = (_aten.embedding, _aten.index, _aten.index_select)
_DRAWS = (_aten.bernoulli_, _aten.bernoulli, _aten.rand_like, _aten.native_dropout)
_OPTIMIZER_BYTES = 28
"""Of fused AdamW in float32, for a parameter: reads it, its gradient and two moments, writes all but the gradient."""


@dataclass(frozen=True)
class Layer:
    """A linear layer: ``tokens`` rows of ``inputs`` channels, to ``outputs``."""

    tokens: int
    outputs: int
    inputs: int


@dataclass
class Counts:
    """What a step does at least.

    Attributes:
        products: (operations, bytes) → how often, forward and backward.
        forward, backward: bytes between the products.
        saved: bytes that passes of backward read of what forward left for them, parameters not counted.
        layers: linear layers whose backward a method may change → how often.
        optimizer: bytes.
    """

    products: Counter[tuple[int, int]] = field(default_factory=Counter)
    forward: int = 0
    backward: int = 0
    saved: int = 0
    layers: Counter[Layer] = field(default_factory=Counter)
    optimizer: int = 0

    def record(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "products": [[*each, times] for each, times in self.products.items()],
            "forward_bytes": self.forward,
            "backward_bytes": self.backward,
            "saved_bytes": self.saved,
            "layers": [[each.tokens, each.outputs, each.inputs, times] for each, times in self.layers.items()],
            "optimizer_bytes": self.optimizer,
        }


@dataclass
class _Stored:
    """A tensor's memory: the pass that made it, whether a product did, and the passes that it was counted in."""

    made: int
    by_product: bool
    nbytes: int
    in_forward: bool
    read: set[int] = field(default_factory=set)
    written: bool = False
    free: bool = False


class Counting(TorchDispatchMode):
    """Counts the operators that run under it.

    Passes are numbered: an operator belongs to the pass behind the last product that it depends on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self.is_forward = True
        self.stored: dict[int, _Stored] = {}
        self.alive: list[Any] = []  # so that no memory gets the number of another

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        self._count(func, args, kwargs, given, made, result)
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, given: list[Tensor], made: list[Tensor], result: Any) -> None:
        inputs = [self._of(t) for t in given]
        packet, place = func._overloadpacket, max([0, *(s.made + s.by_product for s in inputs)])
        if all(any(_number(t) == _number(other) for other in given) for t in made) and not func._schema.is_mutable:
            return  # a view
        if packet in _DRAWS:
            for t in made:
                self._of(t).free = True
            if packet is not _aten.native_dropout:
                return
        is_product = packet in flop_registry or packet in _ATTENTION
        if is_product:
            moved = sum(map(_nbytes, {_number(t): t for t in [*given, *made]}.values()))
            self.counts.products[_operations(func, args, kwargs, result), moved] += 1
            for t in given:
                self._write(self._of(t))
        elif packet in _GATHERS:
            self._add(sum(map(_nbytes, made)))
        else:
            for t, stored in zip(given, inputs, strict=True):
                self._read(t, stored, place)
            if packet in _STATISTICS:  # again, for what is done with them
                place += 1
                for t, stored in zip(given, inputs, strict=True):
                    self._read(t, stored, place)
        free = bool(inputs) and all(s.free or s.nbytes < 16 for s in inputs) and not is_product
        for t in made:
            stored = self.stored[_number(t)] = _Stored(place, is_product, _nbytes(t), self.is_forward)
            stored.written, stored.free = is_product, free
            self.alive.append(t.untyped_storage())

    def _read(self, t: Tensor, stored: _Stored, place: int) -> None:
        if stored.free or (stored.made == place and not stored.by_product) or place in stored.read:
            return
        stored.read.add(place)
        self._write(stored)
        self._add(_nbytes(t))
        if stored.in_forward and not self.is_forward and stored.made >= 0:
            self.counts.saved += _nbytes(t)

    def _write(self, stored: _Stored) -> None:
        """What a pass has made, and leaves for later."""
        if not (stored.written or stored.free or stored.made < 0):
            stored.written = True
            self._add(stored.nbytes, stored.in_forward)

    def _add(self, nbytes: int, in_forward: bool | None = None) -> None:
        if self.is_forward if in_forward is None else in_forward:
            self.counts.forward += nbytes
        else:
            self.counts.backward += nbytes

    def _of(self, t: Tensor) -> _Stored:
        number = _number(t)
        if number not in self.stored:  # of a parameter, or the batch
            self.stored[number] = _Stored(-1, False, _nbytes(t), True)
            self.alive.append(t.untyped_storage())
        return self.stored[number]

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """Count the writing of what is left behind the step: gradients."""
        for t in tensors:
            self._write(self._of(t))


def _number(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)


def _nbytes(t: Tensor) -> int:
    """Of a tensor's entries; of an expanded one those that are there."""
    own = [size for size, stride in zip(t.shape, t.stride(), strict=True) if stride]
    return math.prod(own) * t.element_size() if t.numel() else 0


def _operations(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    packet = func._overloadpacket
    if packet in _CONVOLUTIONS:  # of groups the registry counts too many in backward
        backward = packet is _aten.convolution_backward
        y, w = (args[0], args[2]) if backward else (result, args[1])
        wanted = sum(args[-1][:2]) if backward else 1
        return int(2 * wanted * y.numel() * w.numel() // w.shape[0])
    if packet not in _ATTENTION:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    backward = packet is _ATTENTION[1]
    q, k, v = args[1:4] if backward else args[:3]
    place = 7 if backward else 4
    causal = kwargs.get("is_causal", args[place] if len(args) > place else False)
    batch = math.prod(q.shape[:-2])
    once = 2 * batch * q.shape[-2] * k.shape[-2] * (q.shape[-1] + v.shape[-1])
    return int(once * (2.5 if backward else 1) / (2 if causal else 1))


def count(subject: str, tiny: bool = False) -> Counts:
    """Count the exact training step of a subject of `hotrain bench step`, on fake tensors.

    Args:
        subject: as of `tasks.build`.
        tiny: the size for tests.
    """
    task, fake = build(subject, torch.device("cpu"), tiny), FakeTensorMode()
    model = task.model.train()
    _to_fake(model, fake)
    batch = tree_map_only(Tensor, fake.from_tensor, task.batches[0])
    with fake, mock.patch.object(F, "scaled_dot_product_attention", _without_dropout):
        layers: Counter[Layer] = Counter()
        hooks = [
            module.register_forward_hook(lambda module, given, _: layers.update([_layer(module, given[0])]))
            for name, module in model.named_modules()
            if _is_linear(module) and not task.kept_exact(name)
        ]
        mode = Counting()
        with mode:
            loss = task.loss(model, batch)
            mode.is_forward = False
            loss.backward()
            mode.leave(p.grad for p in model.parameters() if p.grad is not None)
        for hook in hooks:
            hook.remove()
    counts = mode.counts
    counts.layers = layers
    if task.trains:
        counts.optimizer = _OPTIMIZER_BYTES * sum(p.numel() for p in model.parameters())
    return counts


def _without_dropout(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Tensor:
    """Attention in one operator, as on a GPU: PyTorch has none with dropout for a CPU."""
    return _attention(*args, **kwargs)


_attention = F.scaled_dot_product_attention


def _to_fake(model: nn.Module, fake: FakeTensorMode) -> None:
    """Give a model parameters and buffers without data, in place."""
    found: dict[int, Tensor] = {}  # some are shared
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, t in tensors.items():
                if t is not None and id(t) not in found:
                    like = fake.from_tensor(t.detach())
                    found[id(t)] = nn.Parameter(like, t.requires_grad) if isinstance(t, nn.Parameter) else like
                if t is not None:
                    tensors[name] = found[id(t)]  # type: ignore[assignment]


def _is_linear(module: nn.Module) -> bool:
    """Whether its gradients are two products of matrices without overlap: 1×1 convolutions are, others are not."""
    if isinstance(module, nn.Conv2d):
        return module.groups == 1 and module.kernel_size == module.stride
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _layer(module: Any, x: Tensor) -> Layer:
    outputs, inputs = module.weight.shape[0], math.prod(module.weight.shape[1:])
    if type(module).__name__ == "Conv1D":
        outputs, inputs = inputs, outputs
    return Layer(x.numel() // inputs, int(outputs), int(inputs))


def run(subjects: Iterable[str], tiny: bool = False) -> Iterator[dict[str, Any]]:
    """The record of each subject, counted and not timed.

    Args:
        subjects: as of `tasks.build`.
        tiny: the size for tests.
    """
    for subject in subjects:
        untimed = dict.fromkeys(("median_ms", "spread_ms", "peak_bytes", "activation_bytes"))
        row = {"bench": "floors", "subject": subject, "variant": "exact", "tiny": tiny, **untimed}
        yield row | count(subject, tiny).record()

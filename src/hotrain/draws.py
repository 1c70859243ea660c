"""Random numbers as a pure function of (seed, rank, layer, step, stream, index).

Nothing here keeps a generator's state. A layer owns a `Draws`, which counts its training forwards; each forward
gets a `key`, and every number of that step is a hash of the key and the number's own index. So a forward that
activation checkpointing recomputes draws the same numbers, processes of a distributed run draw different ones,
PyTorch's own generators are left alone, and a kernel can make the same noise in registers.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch import nn

_MASK64 = (1 << 64) - 1

# One stream for each use within a step: they must not share numbers.
ROWS, SAVED, GRAD_INPUT, GRAD_WEIGHT, WEIGHT, DROP, LIFTED = range(7)


@dataclass
class _Seed:
    value: int | None = None  # None: follow torch.initial_seed()
    generation: int = 0  # grows with every manual_seed, so that layers know to count from 0 again


_seed = _Seed()


def manual_seed(seed: int) -> None:
    """Fix the draws of every converted layer and count its steps from 0 again.

    Without it draws follow `torch.initial_seed()`, that is the last `torch.manual_seed`.
    """
    if type(seed) is not int:
        raise ValueError(f"manual_seed: got {seed!r}, accepted is an integer")
    _seed.value = seed & _MASK64
    _seed.generation += 1


def current_seed() -> int:
    return torch.initial_seed() & _MASK64 if _seed.value is None else _seed.value


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def mix(*words: int) -> int:
    """A 64-bit hash of integers (splitmix64's finaliser, chained)."""
    h = 0
    for word in words:
        h = (h + (word & _MASK64) + 0x9E3779B97F4A7C15) & _MASK64
        h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & _MASK64
        h ^= h >> 31
    return h


def in_backward() -> bool:
    """Whether autograd's engine is running: a forward seen now is a recomputation."""
    return torch._C._current_graph_task_id() != -1


@dataclass
class Draws:
    """The step counter of one layer. `next()` is called once in every training forward."""

    layer: int
    step: int = -1
    generation: int = field(default_factory=lambda: _seed.generation)

    @classmethod
    def of(cls, name: str) -> Draws:
        return cls(zlib.crc32(name.encode()))

    def next(self) -> int:
        """The key of this forward; a recomputed forward gets the key of the one it repeats."""
        if self.generation != _seed.generation:
            self.step, self.generation = -1, _seed.generation
        if self.step < 0 or not in_backward():
            self.step += 1
        return mix(current_seed(), _rank(), self.layer, self.step)


def state_dict(model: nn.Module) -> dict[str, int]:
    """The seed and every converted layer's step: what a resumed run needs to draw on. Plain integers."""
    from .nn.state import layer_states

    # A signed word, so that the value survives formats that hold 64-bit integers.
    seed = current_seed()
    state = {"seed": seed - (1 << 64) if seed >= 1 << 63 else seed}
    for name, layer in layer_states(model):
        fresh = layer.draws.generation == _seed.generation
        state[f"step.{name}"] = layer.draws.step if fresh else -1
    return state


def load_state_dict(model: nn.Module, state: dict[str, int]) -> None:
    """Continue the draws that `state_dict` described. Raises ValueError when the layers are not the same."""
    from .nn.state import layer_states

    layers = dict(layer_states(model))
    missing = [name for name in layers if f"step.{name}" not in state]
    unknown = [key[5:] for key in state if key.startswith("step.") and key[5:] not in layers]
    if missing or unknown:
        raise ValueError(
            f"draws: the state is of other layers (missing {missing[:3]}, unknown {unknown[:3]}); "
            "convert the model with the same method first"
        )
    manual_seed(state["seed"])
    for name, layer in layers.items():
        layer.draws.step, layer.draws.generation = state[f"step.{name}"], _seed.generation


def _signed(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word


def hash_bits(count: int, key: int, stream: int, device: torch.device, start: int = 0) -> Tensor:
    """`count` 32-bit hashes as int32: entry i depends on (key, stream, start + i) alone.

    The mixing is a two-round multiply-xorshift on uint32, written on int32 (wrapping products, masked shifts), so
    that Triton repeats it bit for bit.
    """
    word = mix(key, stream)
    k0, k1 = _signed(word), _signed(word >> 32)
    h = torch.arange(start, start + count, dtype=torch.int64, device=device).to(torch.int32)
    t = torch.empty_like(h)
    h.add_(k0)
    torch.bitwise_right_shift(h, 16, out=t)
    h.bitwise_xor_(t.bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    torch.bitwise_right_shift(h, 15, out=t)
    h.bitwise_xor_(t.bitwise_and_(0x1FFFF)).bitwise_xor_(k1).mul_(_signed(0x846CA68B))
    torch.bitwise_right_shift(h, 16, out=t)
    return h.bitwise_xor_(t.bitwise_and_(0xFFFF))


def noise16(count: int, key: int, stream: int, device: torch.device, start: int = 0) -> Tensor:
    """`count` int16 values, uniform over all 2¹⁶: one hash serves two neighbours. `start` must be even."""
    pairs = hash_bits((count + 1) // 2, key, stream, device, start // 2)
    return pairs.view(torch.int16)[:count]

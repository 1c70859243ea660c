"""Random numbers as a pure function of (seed, rank, layer, step, stream, index).

Nothing here keeps a generator's state. A layer owns a `Draws`, which counts its training forwards; each forward
gets a `key`, and every number of that step is a hash of the key and the number's own index. So a forward that
activation checkpointing recomputes draws the same numbers, processes of a distributed run draw different ones,
PyTorch's own generators are left alone, and a kernel can make the same noise in registers.

The count is a Python integer on the CPU. On a GPU, and in compiled graphs everywhere, it is a tensor on the device
(`Draws.counter`), so that a graph that is replayed draws anew each time; the keys are the same ones, bit for bit.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .layer_record import AmaxHistory, Ran
from .private import graph_task

if TYPE_CHECKING:
    from torch import nn

ATTRIBUTE = "_hotrain"  # of a converted layer: its `nn.state.LayerState`, which has the layer's draws
_MASK64 = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64's

# One stream for each use within a step: they must not share numbers.
ROWS, SAVED, GRAD_INPUT, GRAD_WEIGHT, WEIGHT, DROP, LIFTED, IMPORTANCE = range(8)


@dataclass
class _Seed:
    value: int | None = None  # None: follow torch.initial_seed()
    generation: int = 0  # grows with every manual_seed, so that layers know to count from 0 again
    graphs: bool = False  # whether a compiled or captured graph may move counters that the host does not see


_seed = _Seed()
_live: weakref.WeakSet[Draws] = weakref.WeakSet()


def manual_seed(seed: int) -> None:
    """Set the seed of the draws of every converted layer, and count its steps from 0 again.

    Without it draws follow `torch.initial_seed()`, that is the last `torch.manual_seed`. Compiled graphs follow this
    function at once; `torch.manual_seed`, and a process group made later, only when they are traced again or after an
    uncompiled training forward. A model saved as a whole brings its seed into a process that has set none.

    Args:
        seed: any integer; its lowest 64 bits count.

    Raises:
        ValueError: `seed` is not an integer.
    """
    if type(seed) is not int:
        raise ValueError(f"manual_seed: got {seed!r}, accepted is an integer")
    _seed.value = seed & _MASK64
    _seed.generation += 1
    for layer in list(_live):
        if layer.counter is not None:
            layer.restart()


def current_seed() -> int:
    """The seed in force, 64 bits."""
    return torch.initial_seed() & _MASK64 if _seed.value is None else _seed.value


def mix(*words: int) -> int:
    """A 64-bit hash of integers (splitmix64's finaliser, chained)."""
    h = 0
    for word in words:
        h = _mixed(h, word)
    return h


def _mixed(h: int, word: int) -> int:
    h = (h + (word & _MASK64) + _GOLDEN) & _MASK64
    h = ((h ^ (h >> 30)) * _FIRST) & _MASK64
    h = ((h ^ (h >> 27)) * _SECOND) & _MASK64
    return h ^ (h >> 31)


def signed(word: int) -> int:
    """The 64-bit word as the value of an int64."""
    word &= _MASK64
    return word - (word >> 63 << 64)


def next_key(counter: Tensor, moves: bool = True) -> Tensor:
    """The key of the next step, computed on the device: the last round of `mix` on int64.

    Args:
        counter: int64 (3,), [salt, step, key]; the salt is ``mix(seed, rank, layer)``. Updated in place.
        moves: whether the step is incremented first.

    Returns:
        int64, (), equal to ``mix(seed, rank, layer, step)`` as a signed word.
    """
    if moves:
        counter[1:2].add_(1)
    key = _last_round(counter[0], counter[1])
    counter[2:].copy_(key)
    return key


def _last_round(h: Tensor, word: Tensor | int) -> Tensor:
    """`_mixed` on int64, with wrapping sums and products and masked shifts. Its last operation stays a xor: in a graph
    `ops` finds the key by it."""
    h = h + word + signed(_GOLDEN)
    h = (h ^ ((h >> 30) & ((1 << 34) - 1))) * signed(_FIRST)
    h = (h ^ ((h >> 27) & ((1 << 37) - 1))) * signed(_SECOND)
    return h ^ ((h >> 31) & ((1 << 33) - 1))


class Draws:
    """The step counter of one layer. `next()`, or on a GPU `next_on()`, is called once in every training forward.

    Attributes:
        counter: int64 (3,), [salt, step, key], on a device, once `place` put it there; the step is read from it from
            then on. It is not a buffer: DistributedDataParallel would give every rank the first one's.
        history: the kernels' amax history, on the same device; a copy of the layer goes on with a copy of it. The
            address of its words identifies the layer in compiled graphs (`layer_of`).
        ran: what the layer's last training step did.
        repeats: whether the last forward ran in backward, which repeats a checkpointed one.
    """

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.generation = _seed.generation
        self._host_step = -1
        self.ran = Ran()
        self.history: AmaxHistory | None = None
        self._start()

    def _start(self) -> None:
        self.repeats = False
        self.counter: Tensor | None = None
        self._salt: int | None = None  # the one written to `counter`
        self._known_salt: tuple[tuple[int, int] | None, int] = None, 0  # seed and rank, and the salt that they make
        _live.add(self)

    @classmethod
    def of(cls, name: str) -> Draws:
        """The draws of the layer of that name."""
        return cls(zlib.crc32(name.encode()))

    def __getstate__(self) -> dict[str, Any]:
        """A copy counts on from the same step, with a counter and a history of its own; in a process that has set no
        seed also with the same seed."""
        amax = None if self.history is None else self.history.words.to("cpu", copy=True)
        # Not the generation, which another process counts for itself.
        step = self.step if self.generation == _seed.generation else -1
        known = {"layer": self.layer, "seed": _seed.value, "step": step}
        return {**known, "ran": replace(self.ran), "amax": amax}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if _seed.value is None:
            _seed.value = state.get("seed")
        self.layer, self.generation, self._host_step = state["layer"], _seed.generation, state["step"]
        self.ran, amax = state["ran"], state["amax"]
        self.history = None if amax is None else AmaxHistory(amax)
        self._start()

    @property
    def step(self) -> int:
        """The step of the last training forward, −1 before the first; assignable. Waits for the device that has it."""
        return self._host_step if self.counter is None else int(self.counter[1])

    @step.setter
    def step(self, value: int) -> None:
        self._host_step = value
        if self.counter is not None:
            self._salt = self._current_salt()
            self.counter[:2].copy_(torch.tensor([signed(self._salt), value], device="cpu"))

    def _current_salt(self) -> int:
        distributed = torch.distributed
        rank = distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
        now = current_seed(), rank
        if self._known_salt[0] != now:
            self._known_salt = now, mix(*now, self.layer)
        return self._known_salt[1]

    def _key(self, step: int) -> int:
        return signed(_mixed(self._current_salt(), step))

    def restart(self) -> None:
        """Count from 0 again, with the seed in force."""
        self.generation = _seed.generation
        self.step = -1

    def next(self) -> int:
        """The key of this forward, the value of an int64; a recomputed forward gets the key of the one it repeats."""
        if self.generation != _seed.generation:
            self.restart()
        if self.counter is not None:
            self._host_step = self.step
        self.repeats = graph_task() != -1
        if self._host_step < 0 or not self.repeats:
            self._host_step += 1
            if self.counter is not None:
                self.step = self._host_step
        return self._key(self._host_step)

    def place(self, device: torch.device) -> bool:
        """Put counter and history on a device, with the current salt. Returns whether they had to be made."""
        made = self.counter is None or self.counter.device != device
        if self.generation != _seed.generation:
            self.restart()
        if made:
            step = self.step
            with torch.inference_mode(False):
                self.counter = torch.zeros(3, dtype=torch.int64, device=device)
                history = AmaxHistory.on(device)
                if self.history is not None:
                    history.words.copy_(self.history.words)
            self.history = history
            _by_address[history.words.data_ptr()] = self
            self.step = step
        elif self._salt != self._current_salt():
            assert self.counter is not None
            self._salt = self._current_salt()
            self.counter[0].fill_(signed(self._salt))
        return made

    def next_on(self, device: torch.device, make: Callable[[Tensor, bool], Tensor] = next_key) -> Tensor:
        """`next` as an int64 () on that device, without synchronizing; `make` is `next_key`, or a kernel like it."""
        self.place(device)
        assert self.counter is not None
        _seed.graphs = _seed.graphs or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
        self.repeats = graph_task() != -1
        moves = self._host_step < 0 or not self.repeats
        self._host_step += moves
        return make(self.counter, moves)

    def host_key(self) -> int | None:
        """The last key, where it is known without synchronizing with a device."""
        return None if _seed.graphs else self._key(self._host_step)


_by_address: weakref.WeakValueDictionary[int, Draws] = weakref.WeakValueDictionary()


def layer_of(words: Tensor) -> Draws | None:
    """The layer whose amax history has these words, None for a copy of them. Reads their address, never the device."""
    return _by_address.get(words.data_ptr())


def place_all(device: torch.device) -> list[Draws]:
    """Give every layer without a counter one on that device, for a graph that is about to be traced; returns those.

    Blocks that share a compiled graph must have the same guards before the first of them is traced.
    """
    _seed.graphs = True
    return [layer for layer in list(_live) if layer.counter is None and layer.place(device)]


def state_dict(model: nn.Module) -> dict[str, int]:
    """The seed and every converted layer's step, which a resumed run needs to continue the draws.

    Args:
        model: converted.

    Returns:
        Plain integers: ``"seed"``, and ``"step.<layer>"`` for each layer.
    """
    state = {"seed": signed(current_seed())}  # signed: formats that hold 64-bit integers keep its value
    for name, draws in _layers(model):
        state[f"step.{name}"] = draws.step if draws.generation == _seed.generation else -1
    return state


def load_state_dict(model: nn.Module, state: dict[str, int]) -> None:
    """Continue the draws from a `state_dict`.

    Args:
        model: converted with the same method.
        state: of `state_dict`.

    Raises:
        ValueError: the layers are not the same.
    """
    layers = dict(_layers(model))
    missing = [name for name in layers if f"step.{name}" not in state]
    unknown = [key[5:] for key in state if key.startswith("step.") and key[5:] not in layers]
    if missing or unknown:
        raise ValueError(
            f"draws: the state is of other layers (missing {missing[:3]}, unknown {unknown[:3]}); "
            "convert the model with the same method first"
        )
    manual_seed(state["seed"])
    for name, draws in layers.items():
        draws.step, draws.generation = state[f"step.{name}"], _seed.generation


def _layers(model: nn.Module) -> Iterator[tuple[str, Draws]]:
    """(name, draws) of every converted layer."""
    for name, module in model.named_modules():
        if ATTRIBUTE in module.__dict__:
            yield name, module.__dict__[ATTRIBUTE].draws


@dataclass(frozen=True, eq=False)
class DeviceKey:
    """A key that stays on its device: the host does not wait for it, and a graph that is replayed draws anew.

    Attributes:
        word: int64, ().
        hashes: a kernel, (word, count, stream, start) → the values of `hash_bits`; None: PyTorch's operators.
        luq: a kernel, (t, alpha, word, stream, dtype) → the codes of `published.luq`; None likewise.
    """

    word: Tensor
    hashes: Callable[[Tensor, int, int, int], Tensor] | None = None
    luq: Callable[[Tensor, Tensor, Tensor, int, torch.dtype], Tensor] | None = None


Key = int | DeviceKey


def derived(key: Key, word: int) -> Key:
    """Another key, ``mix(key, word)``."""
    return mix(key, word) if isinstance(key, int) else replace(key, word=_mixed_on_device(key, word))


def _mixed_on_device(key: DeviceKey, word: int) -> Tensor:
    """``mix(key, word)`` as int64, ()."""
    return _last_round(_last_round(torch.zeros_like(key.word), key.word), signed(word))


def hash_bits(count: int, key: Key, stream: int, device: torch.device, start: int = 0) -> Tensor:
    """`count` 32-bit hashes as int32: element i depends on (key, stream, start + i) only.

    The mixing is a two-round multiply-xorshift on uint32, written on int32 (wrapping products, masked shifts), so
    that Triton repeats it bit for bit.
    """
    return _hashes(key, stream, device)(start, count)


def _hashes(key: Key, stream: int, device: torch.device) -> Callable[[int, int], Tensor]:
    """`hash_bits` as a function of (start, count)."""
    k0: int | Tensor
    k1: int | Tensor
    if isinstance(key, int):
        word = mix(key, stream)
        k0, k1 = _signed32(word), _signed32(word >> 32)
    elif key.hashes is not None:
        given, hashes = key.word, key.hashes
        return lambda start, count: hashes(given, count, stream, start)
    else:
        found = _mixed_on_device(key, stream)
        k0, k1 = found.to(torch.int32), (found >> 32).to(torch.int32)

    def run(start: int, count: int) -> Tensor:
        h = torch.arange(start, start + count, dtype=torch.int64, device=device).to(torch.int32)
        t = torch.empty_like(h)
        h.add_(k0)
        torch.bitwise_right_shift(h, 16, out=t)
        h.bitwise_xor_(t.bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
        torch.bitwise_right_shift(h, 15, out=t)
        h.bitwise_xor_(t.bitwise_and_(0x1FFFF)).bitwise_xor_(k1).mul_(_THIRD)
        torch.bitwise_right_shift(h, 16, out=t)
        return h.bitwise_xor_(t.bitwise_and_(0xFFFF))

    return run


def _signed32(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word


_THIRD = _signed32(0x846CA68B)


def noise(key: Key, stream: int, device: torch.device) -> Callable[[int, int], Tensor]:
    """(start, count) → int16 values, uniform over all 2¹⁶; two neighbours share a hash. `start` must be even."""
    hashes = _hashes(key, stream, device)
    return lambda start, count: hashes(start // 2, (count + 1) // 2).view(torch.int16)[:count]

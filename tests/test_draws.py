"""The noise: the documented hash bit for bit, and as random as the proofs of unbiasedness assume."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from oracle import M64, hash_one, hashes, mix, noise

import hotrain
from hotrain import draws

CPU = torch.device("cpu")

# (key, stream, start): small, large, top bit set, and a start beyond 32 bits
WORDS = [(0, 0, 0), (1, 3, 0), (0x0123456789ABCDEF, 6, 2), (M64, 5, 1000), (1 << 63, 2, (1 << 33) + 8)]


@pytest.mark.parametrize("words", [(0,), (1, 2, 3), (-1, 5), (M64, M64), (2**70 + 1, 0)], ids=str)
def test_mix_is_chained_splitmix64(words: tuple[int, ...]) -> None:
    assert draws.mix(*words) == mix(*words)


@pytest.mark.parametrize(("key", "stream", "start"), WORDS)
def test_hash_equals_plain_python_integers(key: int, stream: int, start: int) -> None:
    got = draws.hash_bits(257, key, stream, CPU, start)
    assert got.dtype == torch.int32
    want = [hash_one(start + i, key, stream) for i in range(257)]
    assert [h & 0xFFFFFFFF for h in got.tolist()] == want
    if start < 1 << 32:
        assert hashes(257, key, stream, start).tolist() == want  # the oracle's vector form, used elsewhere


def on_device(key: int) -> draws.DeviceKey:
    return draws.DeviceKey(torch.tensor(draws.signed(key)))


@pytest.mark.parametrize(("key", "stream", "start"), WORDS)
def test_a_key_on_a_device_draws_the_same(key: int, stream: int, start: int) -> None:
    """Its two rounds of mixing are on int64, which wraps: with and without the top bit, and derived keys too."""
    own = on_device(key)
    assert torch.equal(draws.hash_bits(257, own, stream, CPU, start), draws.hash_bits(257, key, stream, CPU, start))
    assert torch.equal(draws.noise(own, stream, CPU)(0, 7), draws.noise(key, stream, CPU)(0, 7))
    more, known = draws.derived(own, 1), draws.derived(key, 1)
    assert isinstance(more, draws.DeviceKey)
    assert known == mix(key, 1)
    assert torch.equal(draws.hash_bits(9, more, stream, CPU), draws.hash_bits(9, known, stream, CPU))


@pytest.mark.parametrize("count", [0, 1, 2, 7, 4096])
def test_noise_is_the_halves_of_the_hash(count: int) -> None:
    got = draws.noise(77, 3, CPU)(0, count)
    assert got.dtype == torch.int16
    assert got.tolist() == noise(count, 77, 3).tolist()


def test_noise_of_an_entry_does_not_depend_on_how_the_tensor_is_cut() -> None:
    """Quantizers work block by block, kernels in any order."""
    whole = draws.noise(5, 1, CPU)(0, 1000)
    assert torch.equal(torch.cat([draws.noise(5, 1, CPU)(start, 10) for start in range(0, 1000, 10)]), whole)


def uniform(count: int, key: int, stream: int, start: int = 0) -> np.ndarray:
    return (draws.noise(key, stream, CPU)(start, count).numpy().astype(np.float64) + 0.5) / 2**16


N = 1 << 20
KEYS = [0, 1, mix(42, 0, 123, 7)]


@pytest.mark.parametrize("key", KEYS)
def test_noise_is_uniform_over_all_values(key: int) -> None:
    """Chi-square over all 2¹⁶ values, 16 expected in each: mean 65535, deviation √(2·65535) = 362; both tails at 5σ."""
    counts = np.bincount(draws.noise(key, 2, CPU)(0, N).numpy().astype(np.int64) + 2**15, minlength=2**16)
    chi2 = float(((counts - 16) ** 2 / 16).sum())
    assert abs(chi2 - 65535) < 5 * math.sqrt(2 * 65535)


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """In units of its standard deviation, 1/√N for independent draws."""
    return float((a * b).mean() * 12 * math.sqrt(len(a)))  # the variance of U(−½, ½) is 1/12


BASE = (KEYS[2], draws.GRAD_INPUT)
OTHERS = [
    ("next entry (the other half of a hash)", lambda: (uniform(N, *BASE)[:-1], uniform(N, *BASE)[1:])),
    ("next hash", lambda: (uniform(N, *BASE)[:-2], uniform(N, *BASE)[2:])),
    ("next row of 768 channels", lambda: (uniform(N, *BASE)[:-768], uniform(N, *BASE)[768:])),
    ("another stream", lambda: (uniform(N, *BASE), uniform(N, KEYS[2], draws.GRAD_WEIGHT))),
    ("the next key", lambda: (uniform(N, *BASE), uniform(N, KEYS[2] + 1, draws.GRAD_INPUT))),
    ("the next step", lambda: (uniform(N, mix(1, 0, 9, 0), 2), uniform(N, mix(1, 0, 9, 1), 2))),
    ("another rank", lambda: (uniform(N, mix(1, 0, 9, 0), 2), uniform(N, mix(1, 1, 9, 0), 2))),
    ("another layer", lambda: (uniform(N, mix(1, 0, 9, 0), 2), uniform(N, mix(1, 0, 10, 0), 2))),
    ("another seed", lambda: (uniform(N, mix(1, 0, 9, 0), 2), uniform(N, mix(2, 0, 9, 0), 2))),
]


@pytest.mark.parametrize("pair", [p for _, p in OTHERS], ids=[n for n, _ in OTHERS])
def test_no_correlation(pair: Callable[[], tuple[np.ndarray, np.ndarray]]) -> None:
    """Linear and quadratic: neither the values nor their distances from the middle go together (5σ)."""
    a, b = pair()
    assert abs(correlation(a, b)) < 5
    spread_a, spread_b = a**2 - 1 / 12, b**2 - 1 / 12
    assert abs(float((spread_a * spread_b).mean() * 180 * math.sqrt(len(a)))) < 5  # its variance is 1/180


def test_every_bit_is_fair_and_independent_of_the_others() -> None:
    """32 bits of 2¹⁸ hashes: each even, each pair uncorrelated, 5σ with σ = 1/√N (496 pairs)."""
    h = draws.hash_bits(1 << 18, 9, 0, CPU).numpy()
    bits = ((h[:, None] >> np.arange(32)) & 1).astype(np.float32) * 2 - 1
    table = bits.T @ bits / len(bits)
    off = table - np.eye(32)
    assert np.abs(bits.mean(0)).max() * math.sqrt(len(bits)) < 5
    assert np.abs(off).max() * math.sqrt(len(bits)) < 5


def test_streams_have_names_and_numbers_of_their_own() -> None:
    """Kernels repeat these numbers: they are part of the format of a run."""
    named = (draws.ROWS, draws.SAVED, draws.GRAD_INPUT, draws.GRAD_WEIGHT, draws.WEIGHT, draws.DROP, draws.LIFTED)
    assert named == tuple(range(7))


@pytest.fixture
def own_seed() -> Iterator[None]:
    """Leave the module's seed as it was."""
    before = (draws._seed.value, draws._seed.generation)
    yield
    draws._seed.value, draws._seed.generation = before


def test_keys_are_the_hash_of_seed_rank_layer_and_step(own_seed: None) -> None:
    hotrain.manual_seed(42)
    layer = draws.Draws.of("blocks.0.fc1")
    assert [layer.next() & M64 for _ in range(3)] == [mix(42, 0, layer.layer, step) for step in range(3)]
    assert layer.layer != draws.Draws.of("blocks.0.fc2").layer


def test_manual_seed_counts_from_zero_again(own_seed: None) -> None:
    hotrain.manual_seed(7)
    layer = draws.Draws.of("fc")
    first = [layer.next() for _ in range(4)]
    hotrain.manual_seed(7)
    assert [layer.next() for _ in range(4)] == first
    hotrain.manual_seed(8)
    assert layer.next() != first[0]


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_layer_that_another_process_saved_continues(own_seed: None, seeds: int) -> None:
    """However often that one has set a seed: with its seed and step, unless this process has set one."""
    for _ in range(seeds):
        hotrain.manual_seed(7)
    layer = draws.Draws.of("fc")
    layer.next()
    saved, ahead = pickle.dumps(layer), [layer.next() for _ in range(3)]
    draws._seed.value, draws._seed.generation = None, 0  # as in a new process
    twin = pickle.loads(saved)
    assert [twin.next() for _ in range(3)] == ahead
    hotrain.manual_seed(8)
    twin = pickle.loads(saved)
    assert [twin.next() & M64 for _ in range(2)] == [mix(8, 0, twin.layer, step) for step in (1, 2)]


def test_a_layer_that_was_saved_behind_a_new_seed_begins_anew(own_seed: None) -> None:
    hotrain.manual_seed(7)
    layer = draws.Draws.of("fc")
    first = [layer.next() for _ in range(2)]
    hotrain.manual_seed(7)
    twin = pickle.loads(pickle.dumps(layer))
    assert [twin.next() for _ in range(2)] == first


def test_without_a_seed_of_its_own_it_follows_torch(own_seed: None) -> None:
    draws._seed.value = None
    before = torch.initial_seed()
    try:
        torch.manual_seed(123)
        assert draws.current_seed() == 123
    finally:
        torch.manual_seed(before)


def test_drawing_leaves_torchs_generator_alone() -> None:
    state = torch.get_rng_state()
    draws.noise(1, 2, CPU)(0, 100)
    draws.Draws.of("x").next()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("seed", [1.0, "1", None, True])
def test_a_bad_seed_is_refused(seed: object) -> None:
    with pytest.raises(ValueError, match="integer"):
        hotrain.manual_seed(seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [-1, 2**64 - 1, 2**63], ids=["-1", "largest", "top bit"])
def test_seeds_survive_the_state(own_seed: None, seed: int) -> None:
    """Checkpoints hold signed 64-bit integers; the draws continue from the very number."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    hotrain.convert(model, "hot", filter_fn=lambda module, fqn: True)
    hotrain.manual_seed(seed)
    keys = [state.draws for _, state in draws_of(model)]
    for layer in keys:
        layer.next()
    state = draws.state_dict(model)
    assert all(-(1 << 63) <= value < 1 << 63 for value in state.values())
    ahead = [layer.next() for layer in keys]
    hotrain.manual_seed(0)
    draws.load_state_dict(model, state)
    assert [layer.next() for layer in keys] == ahead


def draws_of(model: torch.nn.Module) -> list:
    from hotrain.nn.state import layer_states

    return list(layer_states(model))


def test_a_state_of_other_layers_is_refused(own_seed: None) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    hotrain.convert(model, "hot", filter_fn=lambda module, fqn: True)
    state = draws.state_dict(model)
    state["step.9"] = state.pop("step.0")
    with pytest.raises(ValueError, match=r"missing \['0'\], unknown \['9'\]"):
        draws.load_state_dict(model, state)


# --- Keys on a device


@pytest.mark.parametrize("seed", [0, 1, -1, M64, 1 << 63, 0x0123456789ABCDEF])
@pytest.mark.parametrize("backend", [None, "inductor"], ids=["eager", "inductor"])
def test_device_keys_are_the_hosts_bit_for_bit(own_seed: None, seed: int, backend: str | None) -> None:
    """int64 wraps where the definition masks, and its shifts are arithmetic: every step of many, both signs."""
    make = torch.compile(draws.next_key, backend=backend) if backend else draws.next_key
    hotrain.manual_seed(seed)
    layer, twin = draws.Draws.of("a"), draws.Draws.of("a")
    want = [layer.next() for _ in range(50)]
    keys = [twin.next_on(CPU, make) for _ in range(50)]
    assert [int(key) for key in keys] == want  # and each is a tensor of its own
    assert {(key.dtype, key.shape) for key in keys} == {(torch.int64, torch.Size([]))}
    assert min(int(key) for key in keys) < 0 < max(int(key) for key in keys)
    assert twin.step == int(twin.counter[1]) == 49


def test_a_device_counter_follows_seeds_and_steps(own_seed: None) -> None:
    hotrain.manual_seed(3)
    layer = draws.Draws.of("a")
    first = [int(layer.next_on(CPU)) for _ in range(3)]
    counter = layer.counter
    hotrain.manual_seed(3)
    assert [int(layer.next_on(CPU)) for _ in range(3)] == first
    layer.step = 0
    assert int(layer.next_on(CPU)) == first[1]
    assert layer.next() == first[2]  # the host's way, from the same counter
    draws._seed.value = None
    before = torch.initial_seed()
    try:
        torch.manual_seed(99)  # seen by the next uncompiled forward
        assert int(layer.next_on(CPU)) & M64 == mix(99, 0, layer.layer, 3)
    finally:
        torch.manual_seed(before)
    assert layer.counter is counter  # compiled graphs hold on to it


def test_replays_are_counted(own_seed: None) -> None:
    """What a graph adds on the device is the layer's step; copies take it along and share nothing."""
    hotrain.manual_seed(3)
    layer = draws.Draws.of("a")
    layer.next_on(CPU)
    draws.next_key(layer.counter)
    assert layer.step == 1
    twin = pickle.loads(pickle.dumps(layer))
    assert (twin.step, twin.counter) == (1, None)
    assert twin.next_on(CPU) == layer.next_on(CPU)


def test_a_recomputed_forward_repeats_its_key(own_seed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    hotrain.manual_seed(3)
    layer = draws.Draws.of("a")
    key = layer.next_on(CPU)
    monkeypatch.setattr(draws, "graph_task", lambda: 0)
    assert layer.next_on(CPU) == key
    monkeypatch.undo()
    assert layer.next_on(CPU) != key


def test_the_words_of_a_history_tell_their_layer_by_address() -> None:
    layers = [draws.Draws.of(name) for name in "ab"]
    for layer in layers:
        assert layer.place(CPU)
        assert not layer.place(CPU)
    for layer in layers:
        assert draws.layer_of(layer.history.words) is layer
        assert draws.layer_of(layer.history.words.clone()) is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_goes_on_with_the_amax_history_of_its_original(copied) -> None:
    layer = draws.Draws.of("a")
    layer.place(CPU)
    layer.history.words[2, 0] = 7
    twin = copied(layer)
    twin.place(CPU)
    assert int(twin.history.rows[2][0]) == 7
    twin.history.words.zero_()
    assert int(layer.history.rows[2][0]) == 7

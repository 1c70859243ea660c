"""Which tensors are kept exact for the time that a step lacks: those that take least memory for it."""

from __future__ import annotations

import collections

import pytest

from hotrain.compress import choosing

# ms that each saves, and its bytes
TIMES = {"large": (1.0, 100), "middle": (0.2, 30), "small": (0.15, 16), "costs": (-0.1, 10)}


@pytest.mark.parametrize(
    ("late", "wanted"),
    [
        (0.0, []),
        (0.1, ["small"]),  # not the large one, which saves most for its bytes
        (0.18, ["middle"]),
        (0.9, ["large"]),
        (1.05, ["large", "small"]),
        (1.3, ["large", "middle", "small"]),
        (9.0, ["large", "middle", "small"]),  # all that save time, though it is not enough
    ],
)
def test_the_fewest_bytes_for_the_time(late: float, wanted: list[str]) -> None:
    done: list[str] = []
    kept: collections.Counter[str] = collections.Counter()
    found = [choosing.Candidate(name, *numbers, lambda name=name: done.append(name)) for name, numbers in TIMES.items()]
    left = choosing._keep_exact(found, late, kept)
    assert sorted(done) == wanted
    assert kept == collections.Counter(wanted)
    assert left == pytest.approx(late - sum(TIMES[name][0] for name in wanted))


def test_one_that_is_enough_is_taken_before_several() -> None:
    """The first saves most for its bytes, but five of it would take more than the one."""
    done: list[str] = []
    times = {**{f"{n}": (0.1, 10) for n in range(5)}, "one": (0.5, 45)}
    found = [choosing.Candidate(name, *numbers, lambda name=name: done.append(name)) for name, numbers in times.items()]
    choosing._keep_exact(found, 0.5, collections.Counter())
    assert done == ["one"]

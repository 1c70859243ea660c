"""Which rows are low, and the drawn ones: unbiased tile by tile, and without noise over a group of neighbours."""

from __future__ import annotations

import math

import pytest
import torch
from oracle import drawn_rows, hadamard, row_order, sign_changes

from hotrain.transform.rows import Rows, order

CPU = torch.device("cpu")

# docs/maths.md, the canonical order of 4×4 tiles and the 1-D order
LP_L1 = [0, 8, 2, 10, 12, 3, 14, 11, 4, 1, 15, 6, 9, 7, 13, 5]
SEQUENCY = [0, 8, 12, 4, 6, 14, 10, 2, 3, 11, 15, 7, 5, 13, 9, 1]


def test_canonical_lists() -> None:
    assert list(order(16, "lp_l1")) == LP_L1
    assert list(order(16, "sequency")) == SEQUENCY


@pytest.mark.parametrize(
    ("rank", "kind", "rows"),
    [
        (8, "lp_l1", {0, 8, 2, 10, 12, 3, 14, 11}),
        (4, "lp_l1", {0, 8, 2, 10}),  # the 2×2 low frequencies
        (2, "lp_l1", {0, 8}),
        (1, "lp_l1", {0}),
        (8, "sequency", {0, 8, 12, 4, 6, 14, 10, 2}),
        (4, "sequency", {0, 8, 12, 4}),
    ],
)
def test_the_rows_of_each_rank(rank: int, kind: str, rows: set[int]) -> None:
    assert set(Rows(16, rank, 0, kind).fixed_rows(CPU).tolist()) == rows


@pytest.mark.parametrize("n", [4, 16, 64])
@pytest.mark.parametrize("kind", ["lp_l1", "sequency"])
def test_orders_equal_those_counted_on_pictures(n: int, kind: str) -> None:
    assert list(order(n, kind)) == row_order(n, kind)


def test_l1_shells_have_the_published_sizes() -> None:
    """v+h < o: 1, 3, 6, 10, 13, 15, 16 of 4×4; 21 of 8×8 for o = 6, LBP-WHT's choice."""
    h16, h64 = hadamard(16), hadamard(64)

    def reach(h: torch.Tensor, side: int, i: int) -> int:
        picture = h[i].view(side, side)
        return sign_changes(picture[:, 0]) + sign_changes(picture[0])

    by_order = [reach(h16, 4, i) for i in order(16, "lp_l1")]
    assert [sum(v < o for v in by_order) for o in range(1, 8)] == [1, 3, 6, 10, 13, 15, 16]
    assert by_order == sorted(by_order)
    assert all(reach(h64, 8, i) < 6 for i in order(64, "lp_l1")[:21])
    assert all(reach(h64, 8, i) >= 6 for i in order(64, "lp_l1")[21:])


@pytest.mark.parametrize(("n", "kind"), [(16, "zigzag"), (8, "lp_l1")])
def test_impossible_orders_are_refused(n: int, kind: str) -> None:
    with pytest.raises(ValueError, match="sequency"):
        order(n, kind)


CASES = [
    # (rank, sampled, tiles in which every row of the tail is drawn equally often)
    (8, 4, 3),  # hot-unbiased: three neighbours share the 12 rows
    (8, 2, 5),  # 6+2
    (8, 8, 2),  # nothing fixed
    (6, 3, 13),  # 3 of 13: no common divisor, thirteen tiles
    (8, 5, 13),
    (12, 8, 3),  # more drawn than half of the tail: 8 of 12
    (2, 1, 15),
    (16, 8, 1),  # full rank: all of them in every tile
]


@pytest.mark.parametrize(("rank", "sampled", "group"), CASES)
@pytest.mark.parametrize("kind", ["lp_l1", "sequency"])
def test_draws_are_the_documented_ones(rank: int, sampled: int, group: int, kind: str) -> None:
    rows = Rows(16, rank, sampled, kind)
    rest = row_order(16, kind)[rank - sampled :]
    for tiles in (0, 1, group, 2 * group + 1):
        assert rows.drawn(tiles, 99, CPU).tolist() == drawn_rows(tiles, rest, sampled, 99)


@pytest.mark.parametrize(("rank", "sampled", "group"), CASES)
def test_a_tile_draws_without_repetition_from_the_tail_alone(rank: int, sampled: int, group: int) -> None:
    rows = Rows(16, rank, sampled, "lp_l1")
    tail = set(LP_L1[rank - sampled :])
    for drawn in rows.drawn(50, 3, CPU).tolist():
        assert len(set(drawn)) == sampled
        assert set(drawn) <= tail


@pytest.mark.parametrize(("rank", "sampled", "group"), CASES)
def test_neighbours_cover_the_tail_and_their_mean_is_the_identity(rank: int, sampled: int, group: int) -> None:
    """The stratification, exactly: over one group of tiles the mean of PᵀP is I, for whatever key."""
    rows = Rows(16, rank, sampled, "lp_l1")
    h = hadamard(16) / 4
    for key in range(3):
        total = torch.zeros(16, 16, dtype=torch.float64)
        for drawn in rows.drawn(group, key, CPU).tolist():
            p = torch.cat((h[rows.fixed_rows(CPU)], h[drawn] * rows.gain))
            total += p.T @ p
        torch.testing.assert_close(total / group, torch.eye(16, dtype=torch.float64), rtol=0, atol=1e-14)


def test_gain() -> None:
    assert Rows(16, 8, 4, "sequency").gain == math.sqrt(3)  # 4 of 12
    assert Rows(16, 8, 2, "sequency").gain == math.sqrt(5)  # 2 of 10
    assert Rows(16, 8, 8, "sequency").gain == math.sqrt(2)  # 8 of 16
    assert Rows(16, 16, 8, "sequency").gain == 1.0
    assert Rows(16, 8, 0, "sequency").gain == 1.0


def test_each_row_and_each_pair_is_equally_likely() -> None:
    """One tile over 6,000 keys: 4 of 12. Counts of rows (p = 1/3) and of pairs (p = 4·3/(12·11) = 1/11) within 5σ."""
    rows, keys = Rows(16, 8, 4, "lp_l1"), 6000
    seen = torch.zeros(keys, 16, dtype=torch.float64)
    for key in range(keys):
        seen[key, rows.drawn(1, key, CPU)[0]] = 1
    tail = seen[:, LP_L1[4:]]
    counts, pairs = tail.sum(0), tail.T @ tail
    assert ((counts - keys / 3).abs() < 5 * math.sqrt(keys * (1 / 3) * (2 / 3))).all()
    off = pairs[~torch.eye(12, dtype=torch.bool)]
    assert ((off - keys / 11).abs() < 5 * math.sqrt(keys * (1 / 11) * (10 / 11))).all()
    assert float(seen[:, LP_L1[:4]].sum()) == 0


def test_tiles_of_one_walk_apart_draw_independently() -> None:
    """Tiles 0 and 3 (another group) share 4·4/12 rows on average; tiles 0 and 1 share none."""
    rows, keys = Rows(16, 8, 4, "lp_l1"), 2000
    shared = torch.tensor(
        [
            [len(set(d[0]) & set(d[3])), len(set(d[0]) & set(d[1]))]
            for d in (rows.drawn(4, k, CPU).tolist() for k in range(keys))
        ],
        dtype=torch.float64,
    )
    # hypergeometric: mean 4/3, variance 4·(1/3)(2/3)·8/11
    assert abs(float(shared[:, 0].mean()) - 4 / 3) < 5 * math.sqrt(4 * 2 / 9 * 8 / 11 / keys)
    assert float(shared[:, 1].sum()) == 0

"""Which tokens form which tile, and the projection onto the kept rows."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import projection
from torch._subclasses.fake_tensor import FakeTensorMode

from hotrain.transform.rows import order
from hotrain.transform.tokens import Grid, Layout, Places, layout, lift, project, row_indices

KEY = 0x5EED


def lay_of(
    lead: tuple[int, ...],
    rank: int = 8,
    sampled: int = 0,
    order: str = "auto",
    grid: Grid | None = None,
    tile: int = 16,
    across: bool = True,
) -> Layout:
    return layout(lead, tile, rank, sampled, order, grid, across)


def tiles_of(lay: Layout) -> list[list[int]]:
    n = lay.lines.tile
    return lay.slots[: lay.tiles * n].view(-1, n).tolist()


# --- the layout ------------------------------------------------------------------------------------------------------

GRIDS = st.one_of(
    st.none(),
    st.builds(Grid, st.integers(1, 17), st.integers(1, 17), st.integers(0, 3), st.booleans()),
)


@settings(max_examples=200, deadline=None)
@given(
    outer=st.integers(0, 3),
    length=st.integers(0, 200),
    rank=st.integers(1, 16),
    drawn=st.integers(0, 16),
    order=st.sampled_from(["auto", "lp_l1", "sequency"]),
    grid=GRIDS,
    wide=st.booleans(),
    across=st.booleans(),
)
def test_every_token_is_in_exactly_one_slot(
    outer: int, length: int, rank: int, drawn: int, order: str, grid: Grid | None, wide: bool, across: bool
) -> None:
    """For any length, grid and rank; and P never has more rows than there are tokens."""
    lead = (outer, length if grid is None else grid.tokens)
    tile, rank = (64, min(64, rank * 4)) if wide else (16, rank)
    lay = lay_of(lead, rank, min(drawn, rank), order, grid, tile, across)
    assert lay.samples * lay.tokens == math.prod(lead)
    filled = lay.slots[lay.slots >= 0].tolist()
    assert sorted(filled) == list(range(lay.tokens))
    assert len(lay.slots) == lay.tiles * tile + lay.dense
    assert all(token >= 0 for token in lay.slots[lay.tiles * tile :])  # a dense slot is a token
    assert lay.rows <= lay.samples * lay.tokens
    assert all(max(tile_) >= 0 for tile_ in tiles_of(lay))  # no tile of nothing


@pytest.mark.parametrize("tokens", [1, 7, 16, 49, 64, 196, 197, 577, 1000])
@pytest.mark.parametrize("batch", [1, 2, 128])
def test_no_length_is_a_silent_no_op_nor_wasteful(tokens: int, batch: int) -> None:
    """r = 8 keeps half of the rows, at most an eighth more, wherever the batch holds 128 tokens or more."""
    lay = lay_of((batch, tokens))
    fraction = lay.rows / (batch * tokens)
    if batch * tokens >= 128:
        assert 0.5 <= fraction <= 0.5 * 1.125
    else:
        assert fraction <= 1


@pytest.mark.parametrize(("tokens", "whole"), [(197, 196), (577, 576), (49, 48), (7, 0)])
def test_the_remainder_of_a_line_is_dense(tokens: int, whole: int) -> None:
    lay = lay_of((1, tokens))
    tiles = whole // 16 * 16
    assert lay.line == tiles // 16
    assert lay.slots[tiles:].tolist() == list(range(tiles, tokens))


def test_a_remainder_longer_than_the_rank_is_a_tile_padded_with_zeros() -> None:
    lay = lay_of((1, 28))  # 16 + 12: 8 rows of a padded tile are fewer than 12 dense tokens
    assert (lay.line, lay.dense, lay.rows) == (2, 0, 16)
    assert lay.slots.tolist() == [*range(28), -1, -1, -1, -1]


GRID = Grid(14, 14, 1)


def test_square_tiles_of_a_14_by_14_grid() -> None:
    """Nine 4×4 tiles, row by row; the border strips of two as lines of 16; the class token by itself."""
    lay = lay_of((2, 197), grid=GRID)
    assert (lay.samples, lay.square, lay.line) == (2, 9, 3)
    first = [1 + v * 14 + h for v in range(4) for h in range(4)]
    assert tiles_of(lay)[0] == first
    assert tiles_of(lay)[4] == [t + 4 * 14 + 4 for t in first]
    in_squares = {t for tile in tiles_of(lay)[:9] for t in tile}
    assert in_squares == {1 + v * 14 + h for v in range(12) for h in range(12)}
    assert lay.slots[-1] == 0  # dense prefix
    assert lay.squares.kind == "lp_l1"
    assert lay.lines.kind == "sequency"


def test_border_lines_hold_neighbours() -> None:
    """The strip on the right is read row by row, the one below column by column: a line of 16 is a 2×8 strip."""
    lay = lay_of((1, 196), grid=Grid(14, 14))
    right = [v * 14 + h for v in range(12) for h in (12, 13)]
    assert tiles_of(lay)[9] == right[:16]


def test_register_tokens() -> None:
    lay = lay_of((1, 201), grid=Grid(14, 14, 5))
    assert set(range(5)) <= set(lay.slots[lay.tiles * 16 :].tolist())
    joined = lay_of((1, 201), grid=Grid(14, 14, 5, dense_prefix=False))
    assert not set(range(5)) & set(joined.slots[joined.tiles * 16 :].tolist())
    assert set(range(5)) <= {t for tile in tiles_of(joined)[9:] for t in tile}


def test_tokens_after_the_patches() -> None:
    """Those of YOLOS's boxes; where the patches begin does not depend on them."""
    grid = Grid(14, 14, 1, suffix=7)
    lay = lay_of((1, 204), grid=grid)
    assert tiles_of(lay)[:9] == tiles_of(lay_of((1, 197), grid=GRID))[:9]
    dense = set(lay.slots[lay.tiles * 16 :].tolist())
    assert {0, *range(197, 204)} <= dense
    joined = lay_of((1, 204), grid=Grid(14, 14, 1, dense_prefix=False, suffix=7))
    assert sorted(t for t in joined.slots.tolist() if t >= 0) == list(range(204))
    assert not {0, *range(197, 204)} & set(joined.slots[joined.tiles * 16 :].tolist())


def test_a_seven_by_seven_grid() -> None:
    lay = lay_of((4, 49), grid=Grid(7, 7))
    assert (lay.samples, lay.square) == (4, 1)
    assert tiles_of(lay)[0] == [v * 7 + h for v in range(4) for h in range(4)]


def test_swins_four_axes_are_their_own_grid() -> None:
    lay = lay_of((2, 8, 8), grid=Grid(3, 3))  # another grid, known of the model, does not fit
    assert (lay.samples, lay.tokens, lay.square, lay.line, lay.dense) == (2, 64, 4, 0, 0)
    assert tiles_of(lay)[1] == [v * 8 + h + 4 for v in range(4) for h in range(4)]


def test_five_axes_keep_the_last_two_as_the_grid() -> None:
    lay = lay_of((2, 3, 4, 4))
    assert (lay.samples, lay.square) == (6, 1)


def test_a_grid_of_another_size_is_not_used() -> None:
    assert lay_of((2, 50), grid=GRID).square == 0


def test_sequency_order_uses_no_grid() -> None:
    assert lay_of((2, 197), order="sequency", grid=GRID).square == 0


def test_short_samples_are_flattened_into_the_tiles() -> None:
    """7 tokens a sample would all be dense; 32 samples in a line are 14 tiles."""
    lay = lay_of((32, 7))
    assert (lay.samples, lay.tokens, lay.line, lay.dense) == (1, 224, 14, 0)


def test_lbp_never_mixes_samples() -> None:
    """across = False: P is block-diagonal over samples, so that g_x of one sample sees no other."""
    lay = lay_of((5, 7, 7), rank=21, tile=64, across=False)
    assert (lay.samples, lay.square) == (5, 1)  # 7×7 filled up to 8×8
    p = projection(lay, KEY)
    mixing = p.T @ p
    sample = torch.arange(5 * 49) // 49
    assert float(mixing[sample[:, None] != sample[None, :]].abs().sum()) == 0


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (4, 4)])
def test_lbp_keeps_a_map_of_fewer_tokens_than_rows_as_it_is(size: tuple[int, int]) -> None:
    """Padding 4×4 to 8×8 would keep 21 rows for 16 tokens, and lose some all the same."""
    lay = lay_of((3, *size), rank=21, tile=64, across=False)
    assert lay.rows == 3 * size[0] * size[1]
    torch.testing.assert_close(projection(lay, KEY).T @ projection(lay, KEY), torch.eye(lay.rows, dtype=torch.float64))


def test_a_tracer_leaves_nothing_that_the_next_call_meets() -> None:
    """Index tensors are kept; those that are made under a fake mode are its own, as others are not."""
    x, other = torch.randn(2, 37, 3), torch.randn(2, 53, 3)
    want = project(other, lay_of((2, 53)), KEY)  # kept from here on
    for count in (37, 53):
        with FakeTensorMode():
            z = project(torch.empty(2, count, 3), lay_of((2, count)), KEY)
            assert lift(z, lay_of((2, count)), KEY).shape == (2 * count, 3)
    assert torch.equal(project(other, lay_of((2, 53)), KEY), want)
    p = projection(lay_of((2, 37)), KEY).to(torch.float32)
    torch.testing.assert_close(project(x, lay_of((2, 37)), KEY), p @ x.reshape(-1, 3), rtol=0, atol=1e-5)


def test_a_large_map_is_laid_out_without_a_step_for_each_token() -> None:
    """400×900 positions: with one, multi-scale training pays for each at every new size. Counted in lines of Python."""
    lay = lay_of((1, 400, 900))
    lines = 0

    def count(frame: object, event: str, _: object) -> object:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        places = Places.of(lay, torch.device("cpu"))
    finally:
        sys.settrace(before)
    assert lines < 2000
    assert places.tokens.untyped_storage().nbytes() == 400 * 900 * 8
    assert places.tokens.untyped_storage().data_ptr() == places.singles.untyped_storage().data_ptr()


# --- project and lift ------------------------------------------------------------------------------------------------

CASES = [
    # (lead, options): each with what it exercises
    ((3, 197), {"grid": GRID}),  # squares, lines, remainder, prefix
    ((3, 197), {"grid": Grid(14, 14, 1, dense_prefix=False)}),
    ((2, 201), {"grid": Grid(14, 14, 5)}),
    ((2, 204), {"grid": Grid(14, 14, 1, suffix=7)}),
    ((2, 49), {"grid": Grid(7, 7)}),
    ((2, 8, 8), {}),  # Swin's layout, in place after the permutation
    ((2, 5, 9), {}),  # a non-square map
    ((3, 28), {}),  # a padded tile
    ((9, 7), {}),  # flattened
    ((1,), {}),  # one token
    ((), {}),  # a vector
    ((2, 7, 7), {"tile": 64, "rank": 21, "across": False}),  # LBP-WHT, padded
    ((2, 64), {"tile": 64, "rank": 21, "across": False}),
    ((2, 33), {"tile": 1, "rank": 1}),  # no transform
    ((2, 3, 4, 5), {}),  # five axes
]
IDS = [f"{lead}-{options}" for lead, options in CASES]


@pytest.mark.parametrize(("lead", "options"), CASES, ids=IDS)
@pytest.mark.parametrize("sampled", [0, 4])
def test_project_and_lift_are_the_dense_matrix(lead: tuple[int, ...], options: dict, sampled: int) -> None:
    if options.get("tile") == 1 and sampled:
        options = {**options, "rank": 1}
        sampled = 0
    lay = lay_of(lead, sampled=sampled, **options)
    p = projection(lay, KEY)
    t = torch.randn(*lead, 5, dtype=torch.float64)
    z = project(t, lay, KEY)
    assert z.shape == (lay.rows, 5)
    torch.testing.assert_close(z, p @ t.reshape(-1, 5), rtol=0, atol=1e-13)
    y = torch.randn(lay.rows, 5, dtype=torch.float64)
    torch.testing.assert_close(lift(y, lay, KEY), p.T @ y, rtol=0, atol=1e-13)


@settings(max_examples=60, deadline=None)
@given(
    lead=st.lists(st.integers(1, 9), min_size=0, max_size=4).map(tuple),
    channels=st.integers(1, 20),
    rank=st.integers(1, 16),
    share=st.floats(0, 1),
    across=st.booleans(),
)
def test_they_are_transposes_of_each_other(
    lead: tuple[int, ...], channels: int, rank: int, share: float, across: bool
) -> None:
    """⟨P x, z⟩ = ⟨x, Pᵀ z⟩: what makes g_w of the projected operands a gradient of something."""
    lay = lay_of(lead, rank, round(share * rank), across=across)
    x = torch.randn(*lead, channels, dtype=torch.float64)
    z = torch.randn(lay.rows, channels, dtype=torch.float64)
    left = (project(x, lay, KEY) * z).sum()
    right = (x.reshape(-1, channels) * lift(z, lay, KEY)).sum()
    torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-11)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 4),
    length=st.integers(1, 100),
    sampled=st.integers(0, 16),
    order=st.sampled_from(["auto", "lp_l1", "sequency"]),
)
def test_full_rank_is_exact_at_every_length(batch: int, length: int, sampled: int, order: str) -> None:
    lay = lay_of((batch, length), 16, sampled, order)
    x = torch.randn(batch, length, 3, dtype=torch.float64)
    g = torch.randn(batch, length, 4, dtype=torch.float64)
    got = project(g, lay, KEY).T @ project(x, lay, KEY)
    torch.testing.assert_close(got, g.reshape(-1, 4).T @ x.reshape(-1, 3), rtol=0, atol=1e-11)


def test_a_square_tile_and_a_line_tile_draw_apart() -> None:
    """Each block has its own draw: square tile i must not go through the permutation of line tile i."""
    lay = lay_of((1, 196), rank=8, sampled=4, grid=Grid(14, 14))
    square, line = order(16, "lp_l1"), order(16, "sequency")
    same = 0
    for key in range(200):
        drawn = row_indices(lay, key, torch.device("cpu"))[:, 4:].tolist()
        same += [square.index(i) for i in drawn[0]] == [line.index(i) for i in drawn[lay.square]]
    assert same <= 2  # 4 of 12 in order: one in 11,880


def test_channels_last_and_other_views() -> None:
    image = torch.randn(2, 6, 8, 8, dtype=torch.float64)
    view = image.permute(0, 2, 3, 1)
    lay = lay_of((2, 8, 8))
    assert torch.equal(project(view, lay, KEY), project(view.contiguous(), lay, KEY))


@pytest.mark.parametrize("lead", [(0,), (0, 197), (3, 0), (0, 4, 4), (2, 0, 4)], ids=str)
def test_empty(lead: tuple[int, ...]) -> None:
    lay = lay_of(lead, sampled=4)
    z = project(torch.randn(*lead, 5), lay, KEY)
    assert z.shape == (0, 5)
    assert lift(z, lay, KEY).shape == (0, 5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_dtype_stays(dtype: torch.dtype) -> None:
    lay = lay_of((2, 28), sampled=4)
    z = project(torch.randn(2, 28, 3).to(dtype), lay, KEY)
    assert z.dtype == dtype
    assert lift(z, lay, KEY).dtype == dtype

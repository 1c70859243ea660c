"""The kernels of matrices with a scale per row against the same steps in plain PyTorch: codes, picks, weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_cases import few, gpu_only, key_on
from torch import Tensor

pytest.importorskip("triton")

from hotrain import draws
from hotrain.kernels import picked_rows, row_scales, support
from hotrain.kernels.quantize_kernels import E4M3, E5M2, INT, Output, padded
from hotrain.presets import preset
from hotrain.transform.importance import drawn
from hotrain.transform.tokens import Layout, layout

pytestmark = pytest.mark.usefixtures("poison")
OURS = {
    "picked_rows.pack_rows",
    "picked_rows.picked_codes",
    "picked_rows.restored",
    "gemm.int8_product",
    "noise.hashes",
}

# (rows, O, I): under a tile of tokens, odd columns, more rows than a program has, columns that fill their blocks
SHAPES = [(16, 3, 5), (48, 48, 31), (160, 70, 64), (272, 64, 130), *gpu_only((26_624, 3072, 768), (40_000, 96, 96))]
SAVED = {bits: Output(INT, 2.0 ** (bits - 1) - 1, True, draws.SAVED, True) for bits in (4, 8)}
OF_G = Output(INT, 127.0, True, draws.GRAD_WEIGHT)
IN_FP8 = [Output(E4M3, 448.0), Output(E5M2, 57344.0)]


def rows_of(rows: int) -> Layout:
    """A layout whose P keeps that many rows."""
    return layout((1, rows), 16, 16, 0, "sequency", None, True)


def copy_of(rows: int, columns: int, device: torch.device) -> Tensor:
    """Rows of very unequal size, transposed and padded, as the kernel before writes them."""
    to = torch.zeros(padded(columns), padded(rows), device=device)
    to[:columns, :rows] = torch.randn(columns, rows, device=device) * torch.randn(rows, device=device).exp()
    return to


def both(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> tuple[Any, Any]:
    """What the kernels return, and what plain PyTorch returns in their place."""
    found = call()
    with monkeypatch.context() as patch:
        patch.setattr(support, "_broken", OURS)
        return found, call()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "outputs", "columns"), SHAPES)
def test_rows_are_packed_as_the_definition_packs_them(rows, outputs, columns, bits, device, monkeypatch):
    method, lay, key = preset("hot-importance", saved_bits=bits), rows_of(rows), key_on(device)
    copied = copy_of(rows, columns, device)
    kept, want = both(monkeypatch, lambda: row_scales.packed(copied, columns, lay, SAVED[bits], method, key))
    # On a GPU PyTorch divides by a number as a product with its reciprocal: a last bit.
    torch.testing.assert_close(kept[1], want[1], rtol=2**-23, atol=0)
    assert few(kept[0] != want[0], 1e-3)  # a product with the reciprocal of a scale, or a division: a last bit
    back, wanted = both(monkeypatch, lambda: row_scales.restored(want, columns, torch.float32))
    assert torch.equal(back, wanted)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("share", "bits", "of_g"),
    [(0.5, 4, OF_G), (0.5, 8, OF_G), (0.2, 4, OF_G), (1.0, 4, OF_G), *((s, 4, g) for s in (0.5, 1.0) for g in IN_FP8)],
    ids=lambda value: f"number{value.number}" if isinstance(value, Output) else None,
)
@pytest.mark.parametrize(("rows", "outputs", "columns"), SHAPES)
def test_the_product_of_the_picked_rows(rows, outputs, columns, share, bits, of_g, transposed, device, monkeypatch):
    """The same rows with the same weights: what differs are codes of P g_y that float32 moves over a boundary."""
    method, lay, key = preset("hot-importance", saved_bits=bits), rows_of(rows), key_on(device)
    kept = row_scales.packed(copy_of(rows, columns, device), columns, lay, SAVED[bits], method, key)
    g = copy_of(rows, outputs, device)
    size, dtype = (outputs, columns), torch.float32
    found, want = both(
        monkeypatch, lambda: row_scales.grad_weight(g, kept, share, of_g, lay, key, size, dtype, transposed)
    )
    assert found.shape == ((columns, outputs) if transposed else size)
    assert ((found - want).norm() / want.norm()).item() <= 2e-3


@pytest.mark.parametrize(("rows", "chunk"), [(160, 16), (160, 64), (160, 16384), *gpu_only((16_640, 16384))])
@pytest.mark.parametrize("sizes", ["unequal", "equal", "one", "none"])
def test_the_draw_is_the_definitions(sizes, rows, chunk, device, monkeypatch):
    """Picks and factors, of one program that sees all rows at once or a chunk of them at a time."""
    monkeypatch.setattr(picked_rows, "_CHUNK", chunk)
    outputs, columns, share, key = 32, 32, 0.5, key_on(device)
    x, g = copy_of(rows, columns, device), copy_of(rows, outputs, device)
    if sizes == "equal":
        g, x = g.sign(), x.sign()
    if sizes in ("one", "none"):
        g[:, torch.arange(rows, device=device) != 7] = 0
        g[:, 7] *= sizes == "one"
    kept = picked_rows.pack_rows(x, columns, rows, SAVED[8], 8, key)
    norms = [t.norm(dim=1) for t in (g[:outputs, :rows].T.double(), kept[0].double())]
    picked, weight = drawn(norms[0] * norms[1] * kept[1][:, 0], share, draws.DeviceKey(key))
    seen: dict[str, tuple] = {}
    launch = picked_rows.launch

    def watched(kernel: Any, programs: int, case: Any, args: tuple[Any, ...], *more: Any, **options: Any) -> None:
        seen[kernel.__name__] = args
        launch(kernel, programs, (case, chunk), args, *more, **options)

    monkeypatch.setattr(picked_rows, "launch", watched)
    picked_rows.picked_codes(g, kept, share, OF_G, key, (outputs, columns))
    found, factors = seen["_pick_kernel"][5:7]
    assert len(found) == math.ceil(share * rows)
    assert torch.equal(found.long(), picked)
    torch.testing.assert_close(factors, kept[1][:, 0][picked] * weight.float(), rtol=2**-22, atol=0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("where", ["x", "g"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("of_g", [OF_G, *IN_FP8], ids=["int", "e4m3", "e5m2"])
def test_what_is_not_finite_is_not_lost(of_g, value, where, device):
    """Whichever rows are picked, an infinity or a NaN makes g_w one that is not finite."""
    key, lay, method = key_on(device), rows_of(64), preset("hot-importance")
    x, g = copy_of(64, 32, device), copy_of(64, 48, device)
    (x if where == "x" else g)[3, 5] = value
    kept = row_scales.packed(x, 32, lay, SAVED[4], method, key)
    found = row_scales.grad_weight(g, kept, 0.5, of_g, lay, key, (48, 32), torch.float32, False)
    assert not found.isfinite().any()

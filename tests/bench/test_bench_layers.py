"""bench/layers.py and ops.py: the right shapes, gates that a wrong gradient does not pass, rates from times."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from hotrain_bench import layers, ops, timing
from hotrain_bench.layers import Definition, Inputs, Shape
from torch import Tensor

import hotrain
from hotrain import backward

CPU = torch.device("cpu")


def test_the_shapes_are_those_of_the_models() -> None:
    """ViT-B at 128 images of 197 tokens, and Llama-3-8B at 8192 tokens: (tokens, outputs, inputs)."""
    sizes = {s.subject: (s.tokens, s.outputs, s.inputs) for s in layers.shapes(layers.MODELS)}
    assert sizes == {
        "vit_b/qkv/b128": (25216, 2304, 768),
        "vit_b/proj/b128": (25216, 768, 768),
        "vit_b/fc1/b128": (25216, 3072, 768),
        "vit_b/fc2/b128": (25216, 768, 3072),
        "llama8b/q/t8192": (8192, 4096, 4096),
        "llama8b/up/t8192": (8192, 14336, 4096),
        "llama8b/down/t8192": (8192, 4096, 14336),
    }
    with pytest.raises(ValueError, match="got 'gpt', accepted are vit_b, llama"):
        layers.shapes(["gpt"])


@pytest.mark.parametrize(
    "name", ["hot", "hot-unbiased", "hla", "hq", "hq4", "lbp-wht", "int4", "dropout", "hot:number=e4m3"]
)
def test_every_definition_passes_its_gate(name: str) -> None:
    """`bounds` follows from bits and rows: the definition must not be called wrong."""
    method = layers.as_methods([name])[name]
    for shape in layers.shapes(layers.MODELS, tiny=True)[::3]:
        errors = layers.check(shape, name, method, CPU)
        assert set(errors) == {"g_x", "g_w", "g_b"}


def test_gates_are_tight_where_nothing_is_lost() -> None:
    """With full rank, a gate that half of a gradient passes would not be one."""
    assert max(layers.bounds(hotrain.preset("hq", grad_input_bits=8))) < 0.1
    assert layers.bounds(hotrain.preset("hla"))[0] < 0.02
    # 8 of 16 rows of white noise: √½ of the norm is lost, and not much more may be.
    assert math.sqrt(0.5) < layers.bounds(hotrain.preset("hla"))[1] < 0.8


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for `hotrain.kernels` that calls the definition; codes transposed and padded as kernels keep them."""
    module: Any = ModuleType("hotrain.kernels")
    shapes = {s.layout(hotrain.preset("hot")): s for s in layers.shapes(layers.MODELS, tiny=True)}
    module.spoil = lambda t: t

    def definition(method: hotrain.Method, lay: Any, key: Tensor) -> Definition:
        return Definition(shapes[lay], method, int(key) % (1 << 64))

    def keep(x: Tensor, method: hotrain.Method, lay: Any, key: Tensor, history: Any) -> tuple[Tensor, Tensor]:
        codes, scale = definition(method, lay, key).keep(Inputs(x, x, x))
        return torch.nn.functional.pad(codes.T, (0, -lay.rows % 16)), scale

    def gradients(
        g_y: Tensor, w: Tensor, kept: tuple[Tensor, Tensor], method: hotrain.Method, lay: Any, key: Tensor, _: Any,
        needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        codes, scale = kept
        s = Inputs(g_y.new_empty(len(g_y), len(codes)), g_y, w)
        found = definition(method, lay, key).gradients(s, (codes[:, : lay.rows].T.contiguous(), scale), needs)
        return tuple(None if t is None else module.spoil(t) for t in found)

    def grad_codes(
        g_y: Tensor, kept: tuple[Tensor, ...], method: hotrain.Method, lay: Any, key: Tensor, history: Any,
        needs: tuple[bool, bool, bool],
    ) -> object:  # fmt: skip
        return definition(method, lay, key).grad_codes(Inputs(g_y, g_y, g_y), (), needs)

    def weight_codes(w: Tensor, method: hotrain.Method, key: Tensor, history: Any) -> object:
        return backward.rotated_weight(w.float(), method.grad_input, int(key) % (1 << 64))

    module.reason = lambda method, lay, dtype, device: None
    module.keep, module.gradients = keep, gradients
    module.grad_codes, module.weight_codes = grad_codes, weight_codes
    monkeypatch.setitem(sys.modules, "hotrain.kernels", module)
    monkeypatch.setattr(layers, "path_of", lambda s, m, device: layers.Kernels(s, m, layers.KEY, device))
    monkeypatch.setattr(ops, "path_of", layers.path_of)
    return module


def test_kernels_are_held_against_the_definition(kernels: Any) -> None:
    shape, hot = layers.shapes(["vit_b"], tiny=True)[0], hotrain.preset("hot")
    errors = layers.check(shape, "hot", hot, CPU)
    assert errors["g_x_to_definition"] == errors["g_w_to_definition"] == 0.0
    # 4 % off is far below the noise of int4 and above the agreement that is asked for.
    kernels.spoil = lambda t: t * 1.04 if t.dim() == 2 else t
    with pytest.raises(
        layers.Wrong, match=r"vit_b/qkv/b2 hot: g_. of the kernels is 0\.0[34].* away from the reference"
    ):
        layers.check(shape, "hot", hot, CPU)


@pytest.mark.parametrize("spoil", [torch.zeros_like, lambda t: t * math.nan, lambda t: -t], ids=["0", "nan", "sign"])
def test_a_wrong_gradient_stops_the_run_before_any_time(kernels: Any, spoil: Callable[[Tensor], Tensor]) -> None:
    kernels.spoil = spoil
    with pytest.raises(layers.Wrong, match="no times"):
        next(layers.run(["vit_b"], 2, ["hot"], CPU, 1, tiny=True))
    with pytest.raises(layers.Wrong, match="no times"):
        next(ops.run(["hot"], 2, CPU, 1, tiny=True))


def test_a_method_that_no_kernel_supports_is_an_error_with_its_reason(kernels: Any) -> None:
    """On a GPU the definition must not be measured under the name of the kernels."""
    kernels.reason = lambda method, lay, dtype, device: "tiles of 64 tokens have no kernel"
    with pytest.raises(ValueError, match=r"no kernels for hot .*: tiles of 64 tokens"):
        next(layers.run(["vit_b"], 2, ["hot"], CPU, 1, tiny=True))


def test_every_variant_of_a_layer_has_a_record(kernels: Any) -> None:
    rows = list(layers.run(["vit_b", "llama"], 2, ["hot"], CPU, 2, tiny=True))
    assert len({row["subject"] for row in rows}) == 7
    vit = {row["variant"]: row for row in rows if row["subject"] == "vit_b/qkv/b2"}
    assert [name for name, row in vit.items() if row["role"] == "method"] == ["hot", "hot with bias"]
    assert {"bf16", "bf16 with bias", "fp32", "tf32"} <= set(vit)
    parts = {name for name, row in vit.items() if row["role"] == "part"}
    assert parts == {f"hot/{part}" for part in ("keep", "g_y", "w", "g_x", "g_w", "g_x and g_w")}
    assert "fp32" not in {row["variant"] for row in rows if row["subject"].startswith("llama8b")}
    assert vit["hot"]["path"] == "Kernels"
    assert vit["hot"]["errors"]["g_w_to_definition"] == 0.0
    # int8 codes (the padding too) and a scale, against bf16 x of 34 tokens and 32 channels
    rows_kept = layers.shapes(["vit_b"], 2, tiny=True)[0].layout(hotrain.preset("hot")).rows
    assert vit["hot"]["activation_bytes"] == -(-rows_kept // 16) * 16 * 32 + 4
    assert vit["bf16"]["activation_bytes"] == 34 * 32 * 2


def test_the_baseline_and_unknown_names_are_no_methods() -> None:
    with pytest.raises(ValueError, match="'exact' is the baseline"):
        layers.as_methods(["exact"])
    with pytest.raises(ValueError, match="unknown preset"):
        layers.as_methods(["hott"])
    assert layers.as_methods(["hot:rank=4"])["hot:rank=4"].grad_weight.rank == 4


def test_rates_and_shares_are_of_one_run() -> None:
    """2 GB in 1 ms is 2 TB/s; half as much in the same time is half of it. Products likewise, by their operations."""
    table = [
        ops.Op("copy", "ceiling", list, len, 2_000_000_000),
        ops.Op("int8", "ceiling", list, len, 1, 10**12),
        ops.Op("a/keep", "hot", list, len, 1_000_000_000, ceiling="copy"),
        ops.Op("a/g_x", "hot", list, len, 1, 10**12, "int8"),
        ops.Op("a/g_w", "hot", list, len, 1, 10**12, "fp8"),
    ]
    times = {f"{op.name} {op.variant}": timing.Times(ms, 0.0) for op, ms in zip(table, (1, 1, 1, 4, 4), strict=True)}
    rows = {row["subject"]: row for row in ops.rows(table, times)}
    assert rows["copy"]["tb_s"] == pytest.approx(2.0)
    assert rows["int8"]["tflop_s"] == pytest.approx(1000.0)
    assert rows["a/keep"]["share"] == pytest.approx(0.5)
    assert rows["a/g_x"]["share"] == pytest.approx(0.25)
    assert rows["a/g_w"]["share"] is None, "this run measured no fp8 product"


def test_ops_runs_every_op_of_the_table(kernels: Any) -> None:
    rows = list(ops.run(["hot"], 2, CPU, 1, tiny=True))
    kernel = {
        f"{layer}/{part}" for layer in ("vit_b/fc2/b2", "llama8b/down/t64") for part in ("keep", "g_y", "w", "g_w")
    }
    assert {"copy", "bf16", "int8"} | kernel <= {row["subject"] for row in rows}
    assert all(row["median_ms"] > 0 for row in rows)


def test_the_least_bytes_of_a_kernel() -> None:
    """By hand for x of (25088, 768) in bf16: read once, and half of its rows written as int8, 1.25 of x's own bytes.

    g_y is written twice, all of it and half of its rows, a byte a code: 1.75 of its bytes; w once: 1.5.
    """
    shape = Shape("s", (128, 196), 768, 768, layers.Grid(14, 14))
    table = {op.name: op for op in ops.kernel_ops(shape, "hot", hotrain.preset("hot"), CPU)}
    assert table["s/keep"].bytes / (2 * shape.tokens * 768) == pytest.approx(1.25, rel=0.05)
    assert table["s/g_y"].bytes / (2 * shape.tokens * 768) == pytest.approx(1.75, rel=0.05)
    assert table["s/w"].bytes == 3 * 768 * 768
    assert table["s/g_x"].operations == 2 * shape.tokens * 768 * 768
    assert {op.ceiling for op in table.values()} == {"copy", "int8"}

"""`hotrain bench` on a GPU: graphs, clocks and bytes that a CPU has none of. Tiny subjects, no claim about speed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hotrain_bench import layers, ops, step, timing

pytestmark = pytest.mark.gpu
VIT = "vit_base_patch16_224/b128"


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    yield torch.device("cuda")
    step.clean_up(torch.device("cuda"))


def test_a_graph_repeats_the_work_on_the_same_memory(gpu: torch.device) -> None:
    total, one = torch.zeros(4, device=gpu), torch.ones(4, device=gpu)
    work = timing.in_graph(lambda: total.add_(one))
    total.zero_()
    times = timing.interleaved({"add": work}, 3, timing.CudaEvents())
    assert total.tolist() == [4.0] * 4, "three rounds, and one that does not count"
    assert 0 < times["add"].median_ms < 100


def test_layers_by_kernels_agree_with_the_definition_and_are_timed_in_graphs(gpu: torch.device) -> None:
    rows = list(layers.run(layers.MODELS, 2, ["hot-unbiased"], gpu, 2, tiny=True))
    method = [row for row in rows if row["variant"] == "hot-unbiased"]
    assert len(method) == 7
    assert {(row["path"], row["timed"]) for row in method} == {("Kernels", "cuda graph")}
    assert all(row["errors"]["g_w_to_definition"] <= layers.AGREEMENT for row in method)


def test_ops_know_the_ceilings(gpu: torch.device) -> None:
    rows = {row["subject"]: row for row in ops.run(["hot-unbiased"], 2, gpu, 2, tiny=True)}
    assert {"copy", "bf16", "int8", "fp8", "fp8 fast"} <= set(rows)
    assert rows["vit_b/qkv/b2/keep"]["share"] > 0


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # PyTorch's, of a backward's graph that is cut in parts
def test_steps_measure_memory(gpu: torch.device) -> None:
    """Graphs keep to their own pool: their peak is read while they are recorded, and nothing between two steps."""
    names = ["exact", "exact+compile", "exact+compile+offload", "exact+graphs", "hotrain", "hotrain-nographs"]
    rows = {row["variant"]: row for row in step.run([VIT], names, gpu, 3, tiny=True, again=False)}
    assert {name: row["error"] for name, row in rows.items()} == dict.fromkeys(names)
    assert all(row["reserved_bytes"] >= row["peak_bytes"] > row["above_bytes"] > 0 for row in rows.values())
    graphs = {name for name, row in rows.items() if row["activation_bytes"] is None}
    assert graphs == {"exact+graphs", "hotrain"}
    assert all(row["peak_bytes"] > row["activation_bytes"] > 0 for name, row in rows.items() if name not in graphs)
    # Not a step without activations. Peaks of one variant and another do not compare here: what cuBLAS, and the tests
    # before this one, have in the process's memory is more than the tiny model.
    assert rows["exact+graphs"]["above_bytes"] > rows["exact+compile"]["activation_bytes"]

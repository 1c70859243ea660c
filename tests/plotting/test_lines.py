"""The aggregation over seeds, checked by hand-made numbers."""

from __future__ import annotations

import pytest

from hotrain.plotting.lines import bytes_text, gap_text, operations_text, summarize
from hotrain.plotting.memory import changes, parts_of, readable


def row(method: str, seed: int, accuracy: float | None, saved: int | None = 100) -> dict[str, object]:
    return {
        "model": "m", "method": method, "seed": seed, "accuracy": accuracy,
        "saved_bytes": saved, "bit_ops": 8.0, "step_ms": 2.0,
    }  # fmt: skip


def test_gap_is_paired_by_seed() -> None:
    """Seed 2 of exact is missing, so the method's seed 2 counts in its mean and not in its gap."""
    rows = [row("exact", 0, 90.0), row("exact", 1, 94.0), row("hot", 0, 89.0, 25), row("hot", 1, 94.0, 25)]
    rows.append(row("hot", 2, 60.0, 25))
    exact, hot = summarize(rows)
    assert (exact.accuracy, exact.gap, exact.saved_ratio) == (92.0, None, 1.0)
    assert (hot.accuracy, hot.gap, hot.saved_ratio, hot.seeds) == (81.0, -0.5, 0.25, 3)
    assert exact.spread == pytest.approx(8**0.5)


def test_noise_of_three_seeds_is_two_standard_errors_of_the_paired_gap() -> None:
    """Gaps of −1, 0 and +1 have a standard deviation of 1; what both share between seeds does not count."""
    exact = [row("exact", seed, 80.0 + 5 * seed) for seed in range(3)]
    hot = [row("hot", seed, 80.0 + 5 * seed + seed - 1) for seed in range(3)]
    line = summarize([*exact, *hot], {"m": 10_000})[1]
    assert line.noise == pytest.approx(2 / 3**0.5)
    assert (line.by_seeds, line.within_noise) == (True, True)
    assert gap_text(line) == "+0.00 ± 1.15, within noise"


def test_noise_of_fewer_seeds_is_that_of_the_test_images() -> None:
    """At 90 % of 100 images one standard error is 3 points; exact alone decides, so that a band can show it."""
    rows = [row("exact", 0, 90.0), row("hot", 0, 84.5), row("hla", 0, 83.5)]
    exact, hot, hla = summarize(rows, {"m": 100})
    assert (exact.noise, exact.within_noise) == (None, None)
    assert (hot.noise, hla.noise) == (pytest.approx(6.0), pytest.approx(6.0))
    assert (hot.within_noise, hla.within_noise, hot.by_seeds) == (True, False, False)
    assert [line.noise for line in summarize(rows)] == [None, None, None], "an unknown number of images"
    assert gap_text(summarize(rows)[1]) == "−5.50"


@pytest.mark.parametrize("seeds", [1, 3])
def test_noise_is_at_least_one_image(seeds: int) -> None:
    """Exact at 100 %, or the same gap in every seed, would leave none: one image of 50 is 2 points."""
    rows = [row(method, seed, top) for method, top in (("exact", 100.0), ("hot", 98.0)) for seed in range(seeds)]
    line = summarize(rows, {"m": 50})[1]
    assert (line.gap, line.noise, line.within_noise) == (-2.0, 2.0, True)


def test_failed_runs_are_counted_not_averaged() -> None:
    rows = [row("exact", 0, 90.0), row("hot", 0, None, None), row("hot", 1, None, None)]
    hot = summarize(rows)[1]
    assert (hot.failed, hot.accuracy, hot.gap, hot.saved_bytes, hot.saved_ratio) == (
        2,
        None,
        None,
        None,
        None,
    )


def test_without_exact_there_is_no_ratio() -> None:
    (hot,) = summarize([row("hot", 0, 90.0)])
    assert (hot.gap, hot.saved_ratio, hot.bit_ops_ratio, hot.step_ratio) == (None, None, None, None)


def test_what_was_not_measured_is_a_dash() -> None:
    assert [bytes_text(None), bytes_text(15.5 * 2**20)] == ["–", "15.50 MiB"]
    assert [operations_text(None), operations_text(17.3e12)] == ["–", "17.300 T"]


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        ("addmm", "linear layers"),
        ("hotrain linear", "linear layers"),
        ("hotrain conv2d", "convolutions"),
        ("scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("hotrain  bit re lu", "activation functions"),
        ("hotrain slope", "activation functions"),
        ("gelu", "activation functions"),
        ("hotrain attention", "attention"),
        ("native_group_norm", "norms"),
        ("hotrain norm", "norms"),
        ("max_pool2d_with_indices", "max pool2d with indices"),
    ],
)
def test_an_operator_and_its_converted_form_share_a_name(operator: str, name: str) -> None:
    assert readable(operator) == name


def test_each_activation_function_is_called_one() -> None:
    """Figures are drawn without the core: their list of names is by hand."""
    from hotrain.compress.slopes import ACTIVATIONS

    plain = {name for name in ACTIVATIONS if name not in ("gelu_tanh",) and " " not in name}
    assert {name for name in plain if readable(name) != "activation functions"} == set()


def test_changes_are_what_differs_from_exact() -> None:
    tables = {
        "exact": {"addmm": 100, "gelu": 50, "native_layer_norm": 20},
        "hot": {"hotrain linear": 20, "gelu": 50, "native_layer_norm": 20},
        "luq": {"hotrain linear": 30, "gelu": 50, "native_layer_norm": 20},
        "hq8": {"hotrain linear": 20, "hotrain slope": 6, "hotrain norm": 30},
    }
    assert changes(tables) == [
        (["hot", "luq"], ["linear layers"], []),
        (["hq8"], ["linear layers", "activation functions"], ["norms"]),
    ]
    del tables["exact"]
    assert changes(tables) == []


def test_small_operators_are_the_rest_of_all_figures_of_a_page() -> None:
    tables = [{f"a{i}": 10 - i for i in range(5)}, {f"b{i}": 10 - i for i in range(5)}]
    assert parts_of(tables) == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "the rest"]
    assert parts_of(tables[:1]) == [f"a{i}" for i in range(5)]

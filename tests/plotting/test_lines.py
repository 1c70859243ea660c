"""The aggregation over seeds, checked by hand-made numbers."""

from __future__ import annotations

import pytest

from hotrain.plotting.lines import bytes_text, noise, operations_text, summarize
from hotrain.plotting.memory import readable


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
    assert noise(rows, "m") == pytest.approx(8**0.5)


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
    assert noise(rows, "m") is None


def test_without_exact_there_is_no_ratio() -> None:
    (hot,) = summarize([row("hot", 0, 90.0)])
    assert (hot.gap, hot.saved_ratio, hot.bit_ops_ratio, hot.step_ratio) == (None, None, None, None)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (15.5 * 2**20, "15.5 MiB"),
        (2**40, "1024 GiB"),
    ],
)
def test_bytes_text(value: float | None, text: str) -> None:
    assert bytes_text(value) == text


@pytest.mark.parametrize(("value", "text"), [(None, "–"), (12, "12"), (17.3e12, "17.3 T"), (5e15, "5.00 P")])
def test_operations_text(value: float | None, text: str) -> None:
    assert operations_text(value) == text


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        ("addmm", "linear layers"),
        ("hotrain linear", "linear layers"),
        ("hotrain conv2d", "convolutions"),
        ("scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("hotrain  bit re lu", "relu"),
        ("native_group_norm", "group norm"),
    ],
)
def test_an_operator_and_its_converted_form_share_a_name(operator: str, name: str) -> None:
    assert readable(operator) == name

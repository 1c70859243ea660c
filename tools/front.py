"""What the README says in numbers: the default beside exact, checkpointing and torchao, and where it pays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import records
from hotrain_bench import zoo
from hotrain_study.cells import lines, mean_text, read_rows
from hotrain_study.studies import pretraining

import hotrain
from hotrain.presets import DEFAULT, describe

SUBJECT = "vit_base_patch16_224/b128"
DEFAULT_VARIANT = "hotrain-default"
# Exact training that the default is compared with: as CUDA graphs, which the default runs as, where that was measured.
BASELINES = ("exact+graphs", "exact+compile")
# variant → what the README calls it
SHOWN = {
    "exact+graphs": "exact, as CUDA graphs",
    "exact+compile": "exact, compiled",
    "exact+compile+checkpoint": "exact, every block checkpointed",
    "torchao-float8-tensorwise": "torchao float8 (tensorwise)",
    "exact-block": "exact products, compressed activations",
    DEFAULT_VARIANT: f"**hotrain, the default** (`{DEFAULT}`)",
}
MARKS = "¹²³⁴"  # of runs: there are no more variants than these that another run may have


def headline(folder: Path = records.RESULTS) -> str:
    """The latest run of one model: time, peak and, from the study of pre-training, accuracy.

    What was not in that run is marked, as a multiple of exact in its own.
    """
    run = _run_of_default(SUBJECT, folder)
    if run is None:
        return records._none_yet("step")
    base = _baseline(run, SUBJECT)
    assert base is not None
    cells, others = [], {}
    for variant, name in SHOWN.items():
        if variant in BASELINES and variant != base[0]:
            continue
        source, exact, mark = run, base[1], ""
        if records._step_mean(run, SUBJECT, variant) is None:
            earlier = _earlier_run(variant, base[0], folder)
            if earlier is None:
                continue
            source, exact = earlier
            on = "" if source[0]["device"] == run[0]["device"] else f"one {source[0]['device']}, "
            others[where := f"{on}commit {records._commit(source[0])}"] = exact
            mark = f" {MARKS[[*others].index(where)]}"
        ms, peak = (records._step_mean(source, SUBJECT, variant, *more) for more in ((), ("peak_bytes",)))
        assert ms is not None
        if peak is not None:
            cells.append([name + mark, f"{ms:.1f}", f"{ms / exact:.2f}", f"{peak / records.GIB:.2f}"])
    text = records._markdown(["ViT-B/16, batch 128", "ms/step", "× exact", "peak GiB"], cells)
    text += f"\n\nOne run on {_where(run[0])}"
    if others:
        sources = zip(MARKS, others.items(), strict=False)
        text += f" ({'; '.join(f'{mark} {where}, where exact took {ms:.1f} ms' for mark, (where, ms) in sources)})"
    default = [row for row in run if (row["subject"], row["variant"]) == (SUBJECT, DEFAULT_VARIANT)]
    layers = [row["layers"] for row in default if row.get("layers")]
    if layers:
        text += f"; the default ran {_counted(layers[-1])}"
    return f"{text}. {_accuracies(folder)}"


def _counted(groups: list[dict[str, Any]]) -> str:
    """How many layers ran in which number format."""
    counts: dict[str, int] = {}
    for group in groups:
        number = group["g_w"].rpartition("·")[2]
        counts[number] = counts.get(number, 0) + group["layers"]
    converted = [
        f"{count} layers with gradient products in {number}" for number, count in counts.items() if number != "exact"
    ]
    exact = [f"{counts['exact']} exact"] if "exact" in counts else []
    return ", ".join([*converted, *exact])


def _where(row: dict[str, Any]) -> str:
    return f"one {row['device']}, PyTorch {row['torch'].partition('+')[0]}, commit {records._commit(row)}"


def _run_of_default(subject: str, folder: Path) -> list[dict[str, Any]] | None:
    """The latest run that measured the default and exact on a subject."""
    for run in reversed(records._by_run(records._of_bench("step", folder)).values()):
        if records._step_mean(run, subject, DEFAULT_VARIANT) is not None and _baseline(run, subject) is not None:
            return run
    return None


def _earlier_run(variant: str, baseline: str, folder: Path) -> tuple[list[dict[str, Any]], float] | None:
    """The latest run with a variant and this baseline, and the baseline's ms/step."""
    for run in reversed(records._by_run(records._of_bench("step", folder)).values()):
        exact = records._step_mean(run, SUBJECT, baseline)
        if exact is not None and records._step_mean(run, SUBJECT, variant) is not None:
            return run, exact
    return None


def _baseline(run: list[dict[str, Any]], subject: str) -> tuple[str, float] | None:
    """Exact training in a run: the variant, and its ms/step."""
    for variant in BASELINES:
        ms = records._step_mean(run, subject, variant)
        if ms is not None:
            return variant, ms
    return None


def _accuracies(folder: Path) -> str:
    """The default's accuracy against exact, of each network of the pre-training study, every layer converted."""
    rows = read_rows([folder / "studies" / "pretraining.jsonl"])
    found = [line for line in lines(pretraining(), rows) if line.method == DEFAULT and line.gaps]
    if not found:
        return "Accuracy of exactly this configuration is not recorded yet; what is: [results](docs/results.md)."
    gaps = [f"{line.group} {mean_text(line.gaps, error=True, sign='+')}, {len(line.gaps)} seeds" for line in found]
    return (
        f"Accuracy against exact with every layer converted, in points, mean ± standard error: {'; '.join(gaps)} "
        "([results](docs/results.md))."
    )


MOST = 8  # lines of a table in the README


def pays(folder: Path = records.RESULTS, everything: bool = False) -> str:
    """Of each model the default against exact in the latest run that has both, the fastest first.

    Args:
        folder: of the records.
        everything: all models, with the ratio of the peaks; else, of more than `MOST`, the fastest and the slowest, and
            how many are between.
    """
    rows = records._of_bench("step", folder)
    found = []
    for subject in dict.fromkeys(row["subject"] for row in rows):
        run = _run_of_default(subject, folder)
        base = run and _baseline(run, subject)
        if run is None or not base:
            continue
        ms = records._step_mean(run, subject, DEFAULT_VARIANT)
        peaks = [records._step_mean(run, subject, name, "peak_bytes") for name in (base[0], DEFAULT_VARIANT)]
        if ms is None or None in peaks:
            continue
        gib = [f"{peak / records.GIB:.2f}" for peak in peaks if peak is not None]
        if everything:
            gib.append(f"{float(peaks[1] or 0) / float(peaks[0] or 1):.2f}")
        cells = [f"{base[1]:.1f}", f"{ms:.1f}", f"{ms / base[1]:.2f}", *gib, f"`{base[0]}`", records._place(run[0])]
        found.append((ms / base[1], [f"`{subject}`", *cells]))
    if not found:
        return records._none_yet("step")
    headers = [
        "model / batch",
        "exact ms",
        "default ms",
        "× time",
        "exact GiB",
        "default GiB",
        "baseline",
        "commit, GPU",
    ]
    if everything:
        headers.insert(6, "× peak")
    ordered = [cells for _, cells in sorted(found, key=lambda line: line[0])]
    if len(ordered) > MOST and not everything:
        between = f"… {len(ordered) - MOST} more: [does it pay?](docs/pays.md#models-that-were-measured)"
        ordered[MOST // 2 : -(MOST // 2)] = [[between, *[""] * (len(headers) - 1)]]
    return records._markdown(headers, ordered)


def every_model(folder: Path = records.RESULTS) -> str:
    """`pays` of all models."""
    return pays(folder, everything=True)


def without_graphs(folder: Path = records.RESULTS) -> str:
    """Of each model the default against exact, by `torch.compile` without CUDA graphs, in the latest run of both."""
    found: dict[str, tuple[float, list[str], list[dict[str, Any]]]] = {}
    for run in records._by_run(records._of_bench("step", folder)).values():
        for subject in dict.fromkeys(row["subject"] for row in run):
            times = [records._step_mean(run, subject, variant) for variant in zoo.WITHOUT_GRAPHS]
            peaks = [records._step_mean(run, subject, variant, "peak_bytes") for variant in zoo.WITHOUT_GRAPHS]
            exact, ms, before, after = (value or 0.0 for value in (*times, *peaks))
            if exact and ms and before and after:
                spread = max(row["spread_ms"] for row in run if row["subject"] == subject and row["spread_ms"])
                cells = [f"`{subject}`", f"{exact:.1f}", f"{ms:.1f} ± {spread:.1f}", f"{ms / exact:.2f}"]
                cells += [f"{before / records.GIB:.2f}", f"{after / records.GIB:.2f}", records._place(run[0])]
                found[subject] = ms / exact, cells, run
    if not found:
        return records._none_yet("step")
    headers = ["model / batch", "exact ms", "default ms", "× time", "exact GiB", "default GiB", "commit, GPU"]
    ordered = [cells for _, cells, _ in sorted(found.values(), key=lambda line: line[0])]
    commands = records._commands({run[0]["run_id"]: run for *_, run in found.values()}.values())
    return f"{records._markdown(headers, ordered)}\n\n{records.folded(records.COMMANDS, commands)}"


def presets() -> str:
    """The presets, a line each, from the first clause of their docstrings."""
    lines = []
    for name in hotrain.presets():
        first = " ".join(describe(name).split("\n\n")[0].split()).partition(". ")[0].rstrip(".")
        lines.append([f"`{name}`" + (" (default)" if name == DEFAULT else ""), first.replace("|", "\\|")])
    return records._markdown(["preset", "what it is"], lines)


FIELDS = {"ms": ("median_ms", 1.0, ".0f"), "peak": ("peak_bytes", records.GIB, ".1f")}


def figure(asked: str, folder: Path = records.RESULTS) -> str:
    """A number of a sentence: ``SUBJECT VARIANT ms`` or ``… peak`` (GiB), ``… over OTHER`` as a ratio.

    It is of the latest run that has the variant, and a ratio is of one run.

    Raises:
        ValueError: `asked` is none of these, or no record has it.
    """
    words = asked.split()
    if len(words) not in (3, 5) or words[2] not in FIELDS or words[3:4] not in ([], ["over"]):
        raise ValueError(f"figure {asked!r}: accepted is SUBJECT VARIANT ms|peak, or that with 'over VARIANT'")
    subject, variant, field = words[:3]
    name, unit, form = FIELDS[field]
    for run in reversed(records._by_run(records._of_bench("step", folder)).values()):
        value = records._step_mean(run, subject, variant, name)
        if value is not None and len(words) == 3:
            return f"{value / unit:{form}}"
        other = records._step_mean(run, subject, words[-1], name)
        if value is not None and other is not None:
            return f"{value / other:.2f}"
    raise ValueError(f"figure {asked!r}: no record has it")

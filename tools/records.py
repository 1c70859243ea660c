"""Measured results as Markdown, from the records under benchmarks/results; without a record, how to make one.

There are two kinds of record. ``*.jsonl``: one measurement a line (`FIELDS`), from ``make bench`` on a CPU or, with a
``bench`` field that says of what, from ``hotrain bench layers|step|ops`` on a GPU; ratios are formed within one
``run_id`` only, and a ``note``, added by hand, is printed below the table. ``*.json``: the ``summary.json`` of a
`hotrain compare` or `hotrain demo`, copied under a name that says what was compared.

A name ends in its date, ``NAME_2026-11-22.jsonl``; of two records of one day the one with the longer ending, such as
``2026-11-22b``, is the later. Tables print the latest record of each subject and variant.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hotrain
from hotrain.train.run import parse_method

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))
from hotrain_bench import zoo as models  # noqa: E402
from hotrain_bench.layers import Shape, shapes  # noqa: E402
from hotrain_bench.side_by_side import BYTES  # noqa: E402
from hotrain_study.cells import mean_text  # noqa: E402

RESULTS = BENCHMARKS / "results"
FIELDS = (
    "subject",
    "variant",
    "run_id",
    "median_ms",
    "spread_ms",
    "peak_bytes",
    "activation_bytes",
    "device",
    "torch",
    "commit",
    "command",
)
CONTROL = "exact"
NO_BREAK = "\u00a0"


_DATE = re.compile(r"\d{4}-\d{2}-\d{2}\w*$")


def by_date(folder: Path, pattern: str) -> list[Path]:
    """The records of a folder, the oldest first: by the date at the end of the name, then by name."""

    def key(path: Path) -> tuple[str, str]:
        date = _DATE.search(path.stem)
        return (date[0] if date else "", path.name)

    return sorted(folder.glob(pattern), key=key)


def measurements(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The lines of every ``*.jsonl``, the oldest file first.

    Raises:
        ValueError: a line is not JSON or lacks a field; the message names the file and the line.
    """
    found = []
    for path in by_date(folder, "*.jsonl"):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path.name}:{number} is not JSON ({error})") from error
            missing = [name for name in FIELDS if name not in row]
            if missing:
                raise ValueError(f"{path.name}:{number} lacks {', '.join(missing)}")
            found.append(row)
    return found


def layers(only: str = "", folder: Path = RESULTS) -> str:
    """Time and bytes of layers on a CPU, a table a run, ratios to ``exact`` of the same run and subject.

    Args:
        only: a part of the subjects' names between slashes, such as ``all``, the sums of `benchmarks/layers.py`.
    """
    rows = [row for row in measurements(folder) if "bench" not in row]
    tables = []
    for run, latest in _latest_runs([row for row in rows if not only or only in row["subject"].split("/")]):
        tables.append(_run(run, latest))
    return "\n\n".join(tables) or (
        "*No layer is recorded yet: `make bench` measures some on your machine, `make docs` prints them here.*"
    )


def _run(run: list[dict[str, Any]], latest: list[dict[str, Any]]) -> str:
    headers = ["subject", "variant", "backward ms", "× exact", "forward ms", "× exact", "bytes kept", "× exact"]
    lines = []
    controls = {row["subject"]: row for row in run if row["variant"] == CONTROL}
    for row in latest:
        control = controls.get(row["subject"], {})
        cells = [row["subject"], row["variant"]]
        cells += [f"{row['median_ms']:.3g} ± {row['spread_ms']:.2g}", _ratio(row, control, "median_ms")]
        forward = row.get("forward_ms")
        cells += ["–" if forward is None else f"{forward:.3g}", _ratio(row, control, "forward_ms")]
        cells += [f"{row['activation_bytes']:,}", _ratio(row, control, "activation_bytes")]
        lines.append(cells)
    return _conditions(run[0]) + "\n\n" + _markdown(headers, lines)


def _ratio(row: dict[str, Any], control: dict[str, Any], field: str) -> str:
    if row["variant"] == CONTROL or row.get(field) is None or not control.get(field):
        return ""
    return f"{row[field] / control[field]:.2f}"


def _conditions(row: dict[str, Any]) -> str:
    torch = row.get("torch") or row.get("versions", {}).get("torch", "?")
    count, _, rest = str(row.get("threads") or "").partition(" ")  # 4, or "1 a run"
    threads = f", {count} thread{'' if count == '1' else 's'} {rest}".rstrip() if count else ""
    return f"{row['device']}{threads}, PyTorch {torch}, commit {_commit(row)}: `{row['command'].strip()}`"


def _commands(runs: Iterable[list[dict[str, Any]]]) -> list[str]:
    """The conditions of runs, and their commands: a line for those that have the same conditions."""
    found: dict[str, list[str]] = {}
    for run in runs:
        where, _, command = _conditions(run[0]).partition(": `")
        found.setdefault(where, []).append(f"`{command}")
    return [f"* {where}: {'; '.join(commands)}" for where, commands in found.items()]


COMMANDS = "Devices, versions, commits and commands"


def folded(summary: str, lines: Iterable[str]) -> str:
    """Lines of Markdown that a page shows when it is asked for them."""
    return "\n".join(["<details>", f"<summary>{summary}</summary>", "", *lines, "", "</details>"])


def _notes(rows: list[dict[str, Any]]) -> str:
    """What was written by hand beside the records of one run, each note once, with the variants it is about."""
    about: dict[str, list[str]] = {}
    for row in rows:
        if row.get("note"):
            about.setdefault(row["note"], []).append(row["variant"])
    everything = {row["variant"] for row in rows}
    lines = []
    for note, variants in about.items():
        names = "" if set(variants) == everything else ", ".join(f"`{name}`" for name in dict.fromkeys(variants)) + ": "
        lines.append(f"\n\nNote: {names}{note}.")
    return "".join(lines)


def _commit(row: dict[str, Any]) -> str:
    return str(row["commit"])[:10]


def gpu(row: dict[str, Any]) -> str:
    """The device of a record in short: H200."""
    return str(row["device"]).removeprefix("NVIDIA ").split()[0]


def _place(row: dict[str, Any]) -> str:
    """The commit of a record, and its GPU."""
    return f"{_commit(row)}, {gpu(row)}"


def _by_run(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    runs: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        runs.setdefault(row["run_id"], []).append(row)
    return runs


def _latest_runs(rows: list[dict[str, Any]]) -> list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Of each run all its rows, and those whose subject and variant no later run has; without runs that have none."""
    last = {(row["subject"], row["variant"]): row["run_id"] for row in rows}
    found = []
    for run in _by_run(rows).values():
        latest = [row for row in run if last[row["subject"], row["variant"]] == row["run_id"]]
        if latest:
            found.append((run, latest))
    return found


def _of_bench(kind: str, folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The records of one ``hotrain bench`` verb, without those of ``--tiny``, which measure nothing."""
    return [row for row in measurements(folder) if row.get("bench") == kind and not row.get("tiny")]


def _markdown(headers: list[str], rows: list[list[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _none_yet(kind: str) -> str:
    name = f"benchmarks/results/{kind}_DEVICE_DATE.jsonl"
    return (
        f"*Nothing is recorded yet: `hotrain bench {kind} --out {name}` measures on a GPU, `make docs` prints it here.*"
    )


def kernels(folder: Path = RESULTS) -> str:
    """What kernels reach of the device's own rates, a table a run of ``hotrain bench ops``."""
    tables = []
    for _, rows in _latest_runs(_of_bench("ops", folder)):
        lines = []
        for row in rows:
            cells = [row["subject"], row["variant"], f"{row['median_ms'] * 1e3:.1f} ± {row['spread_ms'] * 1e3:.1f}"]
            cells += [f"{row['tb_s']:.2f}", f"{row['tflop_s']:.0f}" if row["operations"] else ""]
            cells.append("" if row["share"] is None else f"{row['share']:.0%} of {row['ceiling']}")
            lines.append(cells)
        table = _markdown(["work", "variant", "µs", "TB/s", "TFLOP/s", "reached"], lines)
        tables.append(_conditions(rows[0]) + "\n\n" + table)
    return "\n\n".join(tables) or _none_yet("ops")


def gpu_layers(folder: Path = RESULTS) -> str:
    """Backward and save of single layers on a GPU, a table a run of ``hotrain bench layers``; speed-ups within it."""
    tables = []
    for run, rows in _latest_runs(_of_bench("layers", folder)):
        times = {(row["subject"], row["variant"]): row["median_ms"] for row in run}
        lines = []
        for row in rows:
            if row["role"] == "part":
                continue
            cells = [row["subject"], row["variant"], f"{row['median_ms'] * 1e3:.1f} ± {row['spread_ms'] * 1e3:.1f}"]
            cells.append(f"{row['eager_ms'] * 1e3:.1f}")
            suffix = WITH_BIAS if row["bias"] else ""
            for baseline in ("bf16", "tf32", "fp32"):
                # Only bf16 is measured with the bias gradient too; the other products leave it out.
                base = times.get((row["subject"], baseline + (suffix if baseline == "bf16" else "")))
                whole = row["role"] == "method" and (baseline == "bf16" or not row["bias"])
                cells.append(f"{base / row['median_ms']:.2f}" if base and whole else "")
            cells.append("" if row["activation_bytes"] is None else f"{row['activation_bytes']:,}")
            lines.append(cells)
        headers = ["layer", "variant", "µs", "µs eager", "× bf16", "× TF32", "× fp32", "bytes kept"]
        tables.append(_conditions(rows[0]) + "\n\n" + _markdown(headers, lines) + _parts(rows) + _notes(rows))
    return "\n\n".join(tables) or _none_yet("layers")


def _parts(rows: list[dict[str, Any]]) -> str:
    """A method's parts side by side, a line a layer and method."""
    names: list[str] = []
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        if row["role"] == "part":
            method, _, name = row["variant"].rpartition("/")
            names.append(name)
            found.setdefault((row["subject"], method), {})[name] = f"{row['median_ms'] * 1e3:.1f}"
    if not found:
        return ""
    columns = list(dict.fromkeys(names))
    lines = [[*which, *(times.get(name, "") for name in columns)] for which, times in found.items()]
    return "\n\n" + _markdown(["layer", "µs of the parts", *columns], lines)


def steps(folder: Path = RESULTS) -> str:
    """Whole training steps: of each subject and variant the latest run, beside compiled exact of that run.

    Times and bytes are means over the rounds of the run. Commits lead to the commands below the table. What `zoo`
    and `front.without_graphs` print is left out, and other models that were swept so: `pays` has a line of each.
    """
    last: dict[tuple[str, str], tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {}
    variants: dict[str, set[str]] = {}
    for row in _of_bench("step", folder):
        variants.setdefault(row["subject"], set()).add(row["variant"])
    both, most = {models.EXACT, models.HOTRAIN}, {*models.VARIANTS, *models.WITHOUT_GRAPHS}
    swept = {subject for subject, names in variants.items() if both <= names <= most}
    for run in _by_run(_of_bench("step", folder)).values():
        for key in dict.fromkeys((row["subject"], row["variant"]) for row in run):
            mine = [row for row in run if (row["subject"], row["variant"]) == key]
            if (key[0] in models.MODELS or key[0] in swept) and key[1] in models.VARIANTS:
                continue
            if key[1] in models.WITHOUT_GRAPHS and _has(run, key[0], *models.WITHOUT_GRAPHS):
                continue
            if any(row["error"] is None for row in mine) or key not in last:
                last[key] = (run, mine)
    if not last:
        return _none_yet("step")
    lines, runs = [], {}
    for subject in dict.fromkeys(subject for subject, _ in last):
        of_subject = [value for (other, _), value in last.items() if other == subject]
        ordered = sorted(of_subject, key=lambda value: _step_order(value[1]))
        for run, rows in sorted(ordered, key=lambda value: gpu(value[1][0]), reverse=True):  # the H200 first
            runs[rows[0]["run_id"]] = run
            lines.append(_step_cells(subject, run, rows))
    headers = ["subject", "variant", "ms/step", "÷ exact+compile", *BYTES.values(), "commit, GPU"]
    notes = [
        f"* {subject}, `{variant}`: {note}."
        for (subject, variant), (_, rows) in last.items()
        for note in dict.fromkeys(row["note"] for row in rows if row.get("note"))
    ]
    commands = _commands(runs.values())
    return "\n\n".join([_markdown(headers, lines), *(["\n".join(notes)] if notes else []), folded(COMMANDS, commands)])


def _has(run: list[dict[str, Any]], subject: str, *variants: str) -> bool:
    """Whether a run has records of all these variants, of times or errors."""
    return set(variants) <= {row["variant"] for row in run if row["subject"] == subject}


def _before(runs: list[list[dict[str, Any]]], subject: str) -> list[dict[str, Any]] | None:
    """The latest run that timed checkpointing of a model beside exact."""
    both = models.EXACT, models.CHECKPOINT
    timed = [run for run in runs if None not in [_step_mean(run, subject, variant) for variant in both]]
    return timed[-1] if timed else None


def zoo(folder: Path = RESULTS) -> str:
    """The models of ``hotrain bench zoo``, a line each: the latest run that timed both exact as CUDA graphs and the
    default; where none did, the latest that tried. What it left out of checkpointing is of the run before. The fastest
    first; errors and commands are below the table.
    """
    lines, notes, runs = [], [], {}
    older: dict[str, list[str]] = {}
    fields = ("median_ms", "peak_bytes", "reserved_bytes")
    both = (models.EXACT, models.HOTRAIN)
    for subject in models.MODELS:
        tried = [run for run in _by_run(_of_bench("step", folder)).values() if _has(run, subject, *both)]
        timed = [run for run in tried if None not in [_step_mean(run, subject, variant) for variant in both]]
        if not tried:
            continue
        run = (timed or tried)[-1]
        runs[run[0]["run_id"]] = run
        mine = [row for row in run if row["subject"] == subject]
        others = dict.fromkeys(row["variant"] for row in mine)
        found = {v: {field: _step_mean(mine, subject, v, field) for field in fields} for v in others}
        if models.CHECKPOINT not in found and (before := _before(tried, subject)):
            runs[before[0]["run_id"]] = before
            found[models.CHECKPOINT] = {
                field: _step_mean(before, subject, models.CHECKPOINT, field) for field in fields
            }
            then = f"{subject} where exact took {_step_mean(before, subject, models.EXACT):.2f} ms"
            older.setdefault(_place(before[0]), []).append(then)
        exact, default = (found[variant]["median_ms"] for variant in both)
        ratio = float("inf") if exact is None or default is None else default / exact
        lines.append((ratio, [subject, *models.cells(found), _place(run[0])]))
        notes += [
            f"* {subject}, `{row['variant']}`: {row['error']}."
            for row in mine
            if row["error"] is not None and row["variant"] in models.VARIANTS
        ]
    if not lines:
        return _none_yet("zoo")
    if older:
        places = [f"{place}: {', '.join(which)}" for place, which in older.items()]
        notes.append(f"* Checkpointing at {'; at '.join(places)}.")
    ordered = [cells for _, cells in sorted(lines, key=lambda line: line[0])]
    commands = _commands(runs.values())
    table = _markdown(["model", *models.HEADERS, "commit, GPU"], ordered)
    return "\n\n".join([table, *(["\n".join(notes)] if notes else []), folded(COMMANDS, commands)])


def _step_order(rows: list[dict[str, Any]]) -> tuple[bool, float]:
    """The baseline first, then the others by their time; what failed last."""
    times = [row["median_ms"] for row in rows if row["error"] is None]
    return (rows[0]["variant"] != STEP_BASELINE, statistics.fmean(times) if times else float("inf"))


def _step_cells(subject: str, run: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[str]:
    measured = [row for row in rows if row["error"] is None]
    variant = rows[0]["variant"]
    if not measured:
        error = rows[0]["error"].replace("|", "\\|")
        return [subject, variant, error, "", *("" for _ in BYTES), _place(rows[0])]
    base = _step_mean(run, subject, STEP_BASELINE)
    ms = statistics.fmean(row["median_ms"] for row in measured)
    cells = [subject, variant, f"{ms:.2f} ± {max(row['spread_ms'] for row in measured):.2f}"]
    cells.append("" if base is None or variant == STEP_BASELINE else f"{ms / base:.3f}")
    for field in BYTES:
        value = _step_mean(measured, subject, variant, field)
        cells.append("–" if value is None else f"{value / GIB:.2f}")
    return [*cells, _place(rows[0])]


def _step_mean(rows: list[dict[str, Any]], subject: str, variant: str, field: str = "median_ms") -> float | None:
    """The mean over the rounds of one variant's field; None where it was not measured."""
    found = [
        row[field]
        for row in rows
        if (row["subject"], row["variant"]) == (subject, variant) and row.get(field) is not None
    ]
    return statistics.fmean(found) if found else None


def curves(folder: Path = RESULTS) -> str:
    """Loss curves with the kernels against the definition's, a line a record of ``benchmarks/curves.py``."""
    rows = [row for _, latest in _latest_runs(_of_bench("curves", folder)) for row in latest]
    if not rows:
        return (
            "*Nothing is recorded yet: `python benchmarks/curves.py --data cifar10.npz --out "
            "benchmarks/results/curves_DEVICE_DATE.jsonl` trains on a GPU, `make docs` prints it here.*"
        )
    lines = []
    for row in rows:
        cells = [row["subject"], row["variant"], str(row["seeds"]), f"{row['distance']:.4f}", f"{row['spread']:.4f}"]
        lines.append([*cells, "follows" if row["within"] else "**does not follow**", _conditions(row)])
    headers = ["training", "method", "seeds", "distance of the mean curves", "spread over seeds", "", "conditions"]
    return _markdown(headers, lines)


def noise(folder: Path = RESULTS) -> str:
    """What noise in g_w costs: losses on the way, attention at the end, a line a record of ``benchmarks/noise.py``."""
    tables = []
    for _, rows in _latest_runs(_of_bench("noise", folder)):
        window = rows[0]["window"]
        places = range(1, len(rows[0]["losses"]), 2)
        headers = ["training", *(f"loss, updates {i * window + 1} to {(i + 1) * window}" for i in places)]
        lines = []
        for row in rows:
            cells = [row["variant"], *(f"{row['losses'][i]:.3f}" for i in places)]
            for name in ("logit_spread", "entropy"):
                first, *others = row[name]
                cells.append(f"{first:g}; {min(others):g} to {max(others):g}")
            lines.append(cells)
        headers += ["logits' spread: block 1; others", "entropy: block 1; others"]
        tables.append(_conditions(rows[0]) + "\n\n" + _markdown(headers, lines) + _notes(rows))
    return "\n\n".join(tables) or "*Nothing is recorded yet: `benchmarks/noise.py` trains the small ViT fifteen ways.*"


def variance(folder: Path = RESULTS) -> str:
    """v of every design over all layers, a table a recipe, and by kind of layer for the last of its snapshots."""
    tables = []
    for run, rows in _latest_runs(_of_bench("variance", folder)):
        whole = {row["subject"]: row for row in rows if row["variant"] == "all layers"}
        if not whole:
            continue
        subject, last = list(whole.items())[-1]
        kinds: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            if row["subject"] == subject and row["variant"] != "all layers":
                parts = row["variant"].split(".")
                kinds.setdefault(parts[-1] if parts[0] == "blocks" else parts[0], []).append(row)
        headers = ["rows of g_w", *(f"{s.partition('/')[2]}: all" for s in whole), "by progress", *kinds]
        lines = []
        for design, figures in last["designs"].items():
            cells = [design, *(_share(row["designs"].get(design, {}).get("parameters")) for row in whole.values())]
            cells.append(_share(figures["progress"] or None))  # 0: too few images to know
            for own in kinds.values():
                found = [(row["parameters"], row["designs"][design]) for row in own if design in row["designs"]]
                total = sum(weight for weight, _ in found)
                cells.append(_share(sum(w * (d["v"] + d["bias2"]) for w, d in found) / total if total else None))
            lines.append(cells)
        tables.append(_conditions(run[0]) + "\n\n" + _markdown(headers, lines) + _notes(rows))
    return "\n\n".join(tables) or "*Nothing is recorded yet: `benchmarks/variance.py` measures it.*"


def low_rank(folder: Path = RESULTS) -> str:
    """Test accuracy of every method by seed and the mean gap to exact training of the same seeds, a table a run.

    Where it is recorded, the training loss of the last epoch too, which a small test set does not blur.
    """
    tables = []
    for run, rows in _latest_runs(_of_bench("low-rank", folder)):
        found: dict[str, dict[int, dict[str, Any]]] = {}
        for row in rows:
            if row["accuracy"] is not None:
                found.setdefault(row["variant"], {})[row["seed"]] = row
        exact, with_loss = found.get("exact", {}), all("train_loss" in row for row in rows)
        by, sign = ("train_loss", 1) if with_loss else ("accuracy", -1)
        means = {variant: sign * statistics.mean(row[by] for row in rows.values()) for variant, rows in found.items()}
        lines = []
        for variant in sorted(found, key=means.__getitem__):
            by_seed = found[variant]
            cells = [variant, ", ".join(f"{by_seed[seed]['accuracy']:.2f}" for seed in sorted(by_seed))]
            for name, digits in (("accuracy", 2), ("train_loss", 4))[: 1 + with_loss]:
                gaps = [row[name] - exact[seed][name] for seed, row in by_seed.items() if seed in exact]
                error = f" ± {statistics.stdev(gaps) / len(gaps) ** 0.5:.{digits}f}" if len(gaps) > 2 else ""
                known = gaps and variant != "exact"
                cells.append(f"{statistics.mean(gaps):+.{digits}f}{error}" if known else "–")
            lines.append(cells)
        headers = ["method", "test accuracy by seed, %", "mean gap to exact, same seeds"]
        headers += ["training loss of the last epoch, above exact's"] * with_loss
        tables.append(f"{rows[0]['subject']}. {_conditions(run[0])}\n\n{_markdown(headers, lines)}")
    return "\n\n".join(tables) or "*Nothing is recorded yet: `benchmarks/low_rank.py` measures it.*"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{max(value, 0.0):.4f}" if value < 0.1 else f"{value:.3f}"


def shared_inputs(folder: Path = RESULTS) -> str:
    """Error of g_w by layer and variant, a table a run of records with ``bench="shared-inputs"`` and ``g_w_error``."""
    tables = []
    for run, rows in _latest_runs(_of_bench("shared-inputs", folder)):
        variants = list(dict.fromkeys(row["variant"] for row in rows))
        errors = {(row["subject"], row["variant"]): f"{row['g_w_error']:.3f}" for row in rows}
        lines = [
            [subject, *(errors.get((subject, variant), "–") for variant in variants)]
            for subject in dict.fromkeys(row["subject"] for row in rows)
        ]
        tables.append(_conditions(run[0]) + "\n\n" + _markdown(["error of g_w", *variants], lines) + _notes(rows))
    return "\n\n".join(tables) or "*What this costs g_w, layer by layer, is not recorded yet.*"


def compatibility(folder: Path = RESULTS) -> str:
    """What models of other libraries went through, a line a record of ``benchmarks/compatibility.py``."""
    tables = []
    for run, rows in _latest_runs(_of_bench("compatibility", folder)):
        stages = list(rows[0]["stages"])
        lines = []
        for row in rows:
            sizes = row.get("kept_bytes"), row.get("exact_bytes")
            share = f"{sizes[0] / sizes[1]:.2f}" if None not in sizes else "–"
            cells = [
                row["library"],
                f"`{row['subject']}`",
                f"{row.get('converted', '–')} + {row.get('kept', '–')}",
                share,
            ]
            lines.append([*cells, *(row["stages"].get(stage) or "yes" for stage in stages)])
        headers = ["library", "model", "layers: converted + exact", "kept for backward, × exact", *stages]
        tables.append(_conditions(run[0]) + "\n\n" + _markdown(headers, lines) + _notes(rows))
    return "\n\n".join(tables) or "*Nothing is recorded yet: `python benchmarks/compatibility.py` runs twenty models.*"


def timm_script(folder: Path = RESULTS) -> str:
    """timm's train.py without and with the patch, a line a case of ``benchmarks/timm_script.py``."""
    tables = []
    for run, latest in _latest_runs(_of_bench("timm-script", folder)):
        lines = []
        for case in dict.fromkeys(row["subject"] for row in latest):
            rows = [next(r for r in run if (r["subject"], r["variant"]) == (case, v)) for v in (CONTROL, "converted")]
            cells = [
                mean_text([losses[-1] for losses in row[name]]) for name in ("losses", "eval_losses") for row in rows
            ]
            kept, exact = rows[1]["kept_bytes"], rows[1]["exact_bytes"]
            cells.append(f"{kept / exact:.2f}" if kept and exact else "–")
            cells += [", ".join(f"{row['resumed'][by][-1]:.3f}" for by in (CONTROL, "converted")) for row in rows]
            lines.append([case, *cells])
        losses = [f"{what}: {by}" for what in ("training loss", "EMA's loss") for by in (CONTROL, "converted")]
        resumed = [f"{by}'s checkpoint, resumed by exact, converted" for by in (CONTROL, "converted")]
        of = f"train.py of timm's commit {run[0]['source']}, timm {run[0]['versions']['timm']}"
        table = _markdown(["run", *losses, "kept for backward, × exact", *resumed], lines)
        tables.append(f"{table}\n\n{of}; {_conditions(run[0])}{_notes(latest)}")
    return "\n\n".join(tables) or (
        "*Nothing is recorded yet: `python benchmarks/timm_script.py path/to/train.py` runs timm's own script.*"
    )


def newcomer(folder: Path = RESULTS) -> str:
    """Seconds from a clone to a converted step, stage by stage, of the latest record of each model."""
    tables = []
    for run, rows in _latest_runs(_of_bench("newcomer", folder)):
        for row in rows:
            stages = row["seconds"]
            lines = [[stage, f"{seconds:.0f}"] for stage, seconds in stages.items()]
            lines.append(["**together**", f"**{sum(stages.values()):.0f}**"])
            where = f"{row['local']} of {row['packages']} packages were on the machine's disk"
            size = f"({row['local_bytes'] / GIB:.1f} GiB, which a download takes its time for)"
            text = f"{_conditions(run[0])}, {row['cores']} cores; {where} {size}"
            tables.append(_markdown([f"`{row['subject']}`", "s"], lines) + f"\n\n{text}{_notes([row])}")
    return "\n\n".join(tables) or "*Nothing is recorded yet: `python benchmarks/newcomer.py` measures it.*"


WAYS = {"one": "one GPU alone", "ddp": "DDP", "fsdp2": "FSDP2"}


def scaling(folder: Path = RESULTS) -> str:
    """Steps on several GPUs, exact and converted, from ``benchmarks/scaling.py``.

    The latest run of each subject, way and way of compiling, with one GPU alone in that run.
    """
    found = [{"graphs": False, **row} for row in _of_bench("scaling", folder)]
    last = {(row["subject"], row["graphs"], row["way"]): row["run_id"] for row in found}
    headers = ["model / batch on each GPU", "way", "exact ms", "hotrain ms", "× time"]
    headers += ["× one GPU, exact", "× one GPU, hotrain", "exact GiB a GPU", "hotrain GiB a GPU", "layers"]
    tables = []
    for run_id, run in _by_run(found).items():
        by_cell = {(row["subject"], row["graphs"], row["way"], row["variant"]): row for row in run}
        lines = []
        latest = [name for name, of in last.items() if of == run_id]
        for subject, graphs in dict.fromkeys(name[:2] for name in latest):
            ways = {way for *name, way in latest if name == [subject, graphs]} | {"one"}
            for way, title in ((way, title) for way, title in WAYS.items() if way in ways):
                pair = [by_cell.get((subject, graphs, way, variant)) for variant in ("exact", "hotrain-default")]
                if any(row is None or row["median_ms"] is None for row in pair):
                    continue
                exact, ours = (row for row in pair if row is not None)
                buckets = ours.get("bucket_mb")
                title += f", buckets of {buckets:g} MiB" if buckets else ""
                title += ", CUDA graphs; reserved" if graphs else ""
                line = [f"`{subject}`", title, *(f"{row['median_ms']:.1f}" for row in (exact, ours))]
                line.append(f"{ours['median_ms'] / exact['median_ms']:.2f}")
                for row in (exact, ours):
                    alone = by_cell.get((subject, graphs, "one", row["variant"]))
                    several = way != "one" and alone is not None and alone["median_ms"] is not None
                    times = row["processes"] * alone["median_ms"] / row["median_ms"] if several and alone else None
                    line.append("–" if times is None else f"{times:.2f}")
                # The pool of CUDA graphs is no tensor's: it is in what is reserved.
                held = [row["reserved_bytes" if graphs else "peak_bytes"] for row in (exact, ours)]
                line += ["–" if nbytes is None else f"{nbytes / GIB:.2f}" for nbytes in held]
                groups = ours.get("layers") or []
                ran = ", ".join(f"{group['layers']} {_of_layers(group)}" for group in groups)
                lines.append([*line, ran or "not recorded"])
        if lines:
            what = f"{run[0]['processes']} × {_conditions(run[0])}"
            tables.append(_markdown(headers, lines) + f"\n\n{what}{_notes(run)}")
    return "\n\n".join(tables) or "*Nothing is recorded yet: `benchmarks/scaling.py` measures it.*"


def _of_layers(group: dict[str, Any]) -> str:
    return "exact" if group["g_x"] == "exact" else "not reported" if group["g_x"] is None else group["method"]


def examples(folder: Path = RESULTS) -> str:
    """What the layers of each example ran on a GPU, from ``benchmarks/examples.py``."""
    tables = []
    for run, rows in _latest_runs(_of_bench("examples", folder)):
        lines = []
        for row in rows:
            ran = ", ".join(f"{group['layers']} {_of_layers(group)}" for group in row.get("ran", []))
            done = f"failed: {row['error']}" if row["error"] else f"{row['seconds']:.0f} s"
            peak = "–" if not row["peak_bytes"] else f"{row['peak_bytes'] / 2**20:,.0f}"
            lines.append([f"`{row['subject']}.py {row['variant']}`".replace(" `", "`"), done, peak, ran or "–"])
        headers = ["example", "took", "peak MiB", "layers"]
        tables.append(_markdown(headers, lines) + f"\n\n{_conditions(run[0])}{_notes(rows)}")
    return "\n\n".join(tables) or "*Nothing is recorded yet: `python benchmarks/examples.py` runs them.*"


def campaign(folder: Path = RESULTS) -> str:
    """Cases tried by ``benchmarks/campaign.py`` and what became of them, a line a group of cases."""
    runs = _latest_runs(_of_bench("campaign", folder))
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _, rows in runs:
        for row in rows:
            kind = str(row["variant"]).split(":")[0]
            if row["subject"] == "soak":
                kind = "leaks on purpose" if kind == "control" else "training steps"
            elif kind.startswith("hotrain "):
                kind = "command lines"
            groups.setdefault((row["subject"], kind), []).append(row)
    lines = []
    for (subject, kind), rows in sorted(groups.items(), key=lambda item: ("soak", "faults", "fuzz").index(item[0][0])):
        outcomes: dict[str, int] = {}
        for row in rows:
            for name, count in row["outcomes"].items():
                outcomes[name] = outcomes.get(name, 0) + count
        what = kind + (f" ({len(rows)} models and methods)" if kind == "training steps" else "")
        told = ", ".join(f"{name}: {count:,}" for name, count in outcomes.items())
        findings = sum(len(row["findings"]) for row in rows)
        lines.append([subject, what, f"{sum(row['cases'] for row in rows):,}", told, str(findings)])
    if not lines:
        return "*Nothing is recorded yet: `python benchmarks/campaign.py fuzz|faults|soak` tries some thousand cases.*"
    commits: dict[str, list[str]] = {}
    for run, _ in runs:
        commits.setdefault(f"{run[0]['device']}, PyTorch {run[0]['torch']}", []).append(_commit(run[0]))
    heads = [f"{where}, commit {', '.join(dict.fromkeys(names))}" for where, names in commits.items()]
    table = _markdown(["campaign", "what", "cases", "what became of them", "findings"], lines)
    soaked = _soaked([row for _, rows in runs for row in rows if row["subject"] == "soak" and "slope" in row])
    return f"{'; '.join(heads)}: `python benchmarks/campaign.py`\n\n{table}{soaked}"


def _soaked(rows: list[dict[str, Any]]) -> str:
    """How steep resident memory rose, of the models with equally many steps; without the leaks on purpose."""
    rows = [row for row in rows if not row["variant"].startswith("control")]
    if not rows:
        return ""
    told = []
    for steps in sorted({row["cases"] for row in rows}, reverse=True):
        some = [row for row in rows if row["cases"] == steps]
        most = max(some, key=lambda row: row["slope"])
        rise = f"{most['slope'] / 1024:,.0f} KiB ({most['variant']})"
        told.append(f"by at most {rise} in the {len(some)} runs of {steps:,} steps")
    kept = [{(r["tensors"], r["tensor_bytes"]) for r in row["readings"]} for row in rows]
    still = "Tensors and their bytes stayed as they were. " if all(len(values) == 1 for values in kept) else ""
    bound = f"a finding is more than {rows[0]['bound'] / 1024:,.0f} KiB"
    return f"\n\n{still}Behind the warm-up resident memory rose, in 1,000 steps, {', '.join(told)}; {bound}."


STEP_BASELINE = "exact+compile"
GIB = 2**30
WITH_BIAS = " with bias"


@dataclass(frozen=True)
class Goal:
    """A figure to reach, and another to stretch for: at least where `higher`, else at most. unit: behind the figure."""

    goal: float
    stretch: float | None
    higher: bool = True
    unit: str = ""

    def asked(self) -> list[str]:
        sign = "≥" if self.higher else "≤"
        return ["" if figure is None else f"{sign} {self._text(figure)}" for figure in (self.goal, self.stretch)]

    def text(self, value: float) -> str:
        """A figure that was reached: one that misses the goal must not look like it."""
        text = self._text(value)
        return self._text(value, 1) if value != self.goal and text == self._text(self.goal) else text

    def _text(self, value: float, more_digits: int = 0) -> str:
        return f"{value:.{more_digits}%}" if self.unit == "%" else f"{value:.{2 + more_digits}f}{self.unit}"

    def verdict(self, value: float) -> str:
        sign = 1 if self.higher else -1
        better = [goal for goal in (self.goal, self.stretch) if goal is not None and (value - goal) * sign >= 0]
        return ("missed", "met", "met, stretch too")[len(better)]


@dataclass(frozen=True)
class Target:
    """A line of the speed that was asked for.

    work, baseline: as asked.  measure: from the records of one run to what was reached by whom, or None.
    """

    work: str
    baseline: str
    goal: Goal
    bench: str
    measure: Callable[[list[dict[str, Any]]], tuple[float, str] | None]

    def cells(self, runs: dict[str, list[dict[str, Any]]]) -> list[str]:
        """The latest run that measured it, and its commit."""
        cells = [self.work, self.baseline, *self.goal.asked()]
        for rows in reversed(runs.values()):
            reached = self.measure(rows)
            if reached is not None:
                value, who = reached
                return [*cells, f"{self.goal.text(value)} ({who})", self.goal.verdict(value), _commit(rows[0])]
        return [*cells, NOT_YET, "", ""]


NOT_YET = "not recorded yet"


def _layers_target(model: str, baseline: str) -> Callable[[list[dict[str, Any]]], tuple[float, str] | None]:
    """The mean over a model's layers of baseline ÷ method, and the method: the one with the largest mean."""

    def measure(rows: list[dict[str, Any]]) -> tuple[float, str] | None:
        times = {(row["subject"], row["variant"]): row["median_ms"] for row in rows}
        subjects = dict.fromkeys(row["subject"] for row in rows if row["subject"].startswith(f"{model}/"))
        methods = dict.fromkeys(row["variant"] for row in rows if row["role"] == "method" and not row["bias"])
        means = []
        for method in methods:
            ratios = [
                times[subject, baseline] / times[subject, method]
                for subject in subjects
                if (subject, baseline) in times and (subject, method) in times
            ]
            if ratios:
                means.append((statistics.fmean(ratios), method))
        return max(means, default=None)

    return measure


def _kernel_target(ending: str) -> Callable[[list[dict[str, Any]]], tuple[float, str] | None]:
    """The smallest share of the copy rate over the layers, by the method where it is largest."""

    def measure(rows: list[dict[str, Any]]) -> tuple[float, str] | None:
        shares: dict[str, list[float]] = {}
        for row in rows:
            if row["subject"].endswith(f"/{ending}") and row["ceiling"] == "copy" and row["share"] is not None:
                shares.setdefault(row["variant"], []).append(row["share"])
        return max(((min(each), f"{method}, slowest layer") for method, each in shares.items()), default=None)

    return measure


def _fp8_forward(rows: list[dict[str, Any]]) -> tuple[float, str] | None:
    """Step time of Llama's blocks with a forward in fp8 over torchao's, both compiled."""
    mine, theirs = (_step_mean(rows, LLAMA_BLOCKS, variant) for variant in (FP8_FORWARD, TORCHAO))
    return None if mine is None or theirs is None else (mine / theirs, FP8_FORWARD)


FLOOR_METHOD = "hot-unbiased:number=e4m3"


@dataclass(frozen=True)
class Bounds:
    """What a layer's backward and save must do at least, with what they took. T tokens, of which K rows are kept, O
    outputs, I inputs; times in µs.
    """

    shape: Shape
    kept: int
    copy: float  # bytes a µs
    times: dict[str, float]  # variant → µs

    @property
    def operations(self) -> float:
        return 2.0 * (self.shape.tokens + self.kept) * self.shape.outputs * self.shape.inputs

    def moved(self) -> dict[str, float]:
        """µs of each kernel's bytes at the copy's rate, everything read and written once, in bf16 and fp8."""
        t, k, o, i = self.shape.tokens, self.kept, self.shape.outputs, self.shape.inputs
        return {"keep": (2 * t + k) * i / self.copy, "g_y": (3 * t + k) * o / self.copy, "w": 3 * o * i / self.copy}

    def part(self, name: str) -> float:
        return self.times[f"{FLOOR_METHOD}/{name}"]

    @property
    def products(self) -> float:
        """µs that both products took."""
        return self.part("g_x and g_w") - self.part("g_y") - self.part("w")

    def at(self, rate: float) -> float:
        """The floor, with products at that many operations a µs."""
        return self.operations / rate + sum(self.moved().values())

    def speed_up(self, took: float) -> float:
        return self.times["bf16"] / took


@dataclass(frozen=True)
class Roofs:
    """What a GPU does at most: bytes a µs of a copy, operations a µs of products in fp8 (of the square of 8192, and of
    the fastest of the layers) and in bf16 (of the fastest layer)."""

    copy: float
    square: float
    fp8: float
    bf16: float


def _bounds(folder: Path) -> tuple[list[dict[str, Any]], Roofs, dict[str, list[Bounds]]] | None:
    """The latest run of layers whose commit has a run of ops: its rows, the roofs, and the bounds of the layers."""
    rates = {_commit(rows[0]): rows for rows in _by_run(_of_bench("ops", folder)).values()}
    runs = [rows for rows in _by_run(_of_bench("layers", folder)).values() if _commit(rows[0]) in rates]
    if not runs:
        return None
    rows, (name, overrides) = runs[-1], parse_method(FLOOR_METHOD)
    method = hotrain.preset(name).override(**overrides)
    ceilings = {row["subject"]: row for row in rates[_commit(rows[0])] if row["variant"] == "ceiling"}
    copy = ceilings["copy"]["tb_s"] * 1e6
    square = max(row["tflop_s"] for name, row in ceilings.items() if name.startswith("fp8")) * 1e6
    models: dict[str, list[Bounds]] = {}
    for shape in shapes(("vit_b", "llama")):
        times = {row["variant"]: row["median_ms"] * 1e3 for row in rows if row["subject"] == shape.subject}
        if times:
            bounds = Bounds(shape, shape.layout(method).rows, copy, times)
            models.setdefault(shape.subject.partition("/")[0], []).append(bounds)
    every = [bounds for each in models.values() for bounds in each]
    fp8 = max(bounds.operations / bounds.products for bounds in every)
    bf16 = max(4.0 * b.shape.tokens * b.shape.outputs * b.shape.inputs / b.times["bf16"] for b in every)
    return rows, Roofs(copy, square, fp8, bf16), models


def roofs(folder: Path = RESULTS) -> tuple[dict[str, Any], Roofs] | None:
    """A row of the run that measured them, and what it measured; None without such a run."""
    found = _bounds(folder)
    return None if found is None else (found[0][0], found[1])


def floor(folder: Path = RESULTS) -> str:
    """Operations and bytes of the latest run of layers over the rates that the run of ops of its commit measured."""
    found = _bounds(folder)
    if found is None:
        return _none_yet("layers")
    rows, measured, models = found
    copy, square, fastest = measured.copy, measured.square, measured.fp8
    lines, sums = [], []
    for model, each in models.items():
        for b in each:
            moved, shape, took = b.moved(), b.shape, b.times[FLOOR_METHOD]
            over = [b.products - b.operations / fastest, *(b.part(name) - moved[name] for name in ("g_y", "keep", "w"))]
            lines.append([
                f"{shape.subject.rpartition('/')[0]} ({shape.tokens}, {b.kept}, {shape.outputs}, {shape.inputs})",
                f"{b.operations / fastest:.1f}", *(f"{moved[name]:.1f}" for name in ("g_y", "keep", "w")),
                f"{b.at(fastest):.0f}", f"{took:.0f}", ", ".join(str(round(part)) for part in over),
                f"{b.times['bf16']:.0f}", f"{b.speed_up(b.at(square)):.2f}", f"{b.speed_up(b.at(fastest)):.2f}",
                f"{b.speed_up(took):.2f}",
            ])  # fmt: skip
        means = [
            statistics.fmean(b.speed_up(took(b)) for b in each)
            for took in (lambda b: b.at(square), lambda b: b.at(fastest), lambda b: b.times[FLOOR_METHOD])
        ]
        lines.append([f"*mean of {model}*", *[""] * 8, *(f"{mean:.2f}" for mean in means)])
        goal = next(target.goal.goal for target in TARGETS if target.work == FLOOR_GOALS[model])
        of_floor, of_square = goal / means[1], goal / means[0]
        sums.append(f"{goal} for {model} is {of_floor:.0%} of the floor's speed-up, {of_square:.0%} of the square's")
    headers = ["layer (T, K, O, I)", "products", "g_y", "x", "w", "floor", "measured"]
    headers += ["above the floor: products, g_y, x, w", "bf16"]
    headers += ["floor's speed-up, square", "floor's speed-up", "measured speed-up"]
    about = (
        f"Roofs: a copy {copy / 1e6:.2f} TB/s; fp8 products {square / 1e6:.0f} TFLOP/s for the square of 8192, "
        f"{fastest / 1e6:.0f} for the fastest of these layers. The floor takes the second."
    )
    return "\n\n".join((_conditions(rows[0]), about, _markdown(headers, lines), "The goals: " + "; ".join(sums) + "."))


TORCHAO, FP8_FORWARD, LLAMA_BLOCKS = "torchao-float8-tensorwise", "hotrain-fp8fwd", "llama8b-4blocks/t8192"
VIT, LLAMA = "backward + save, ViT-B layers, batch 128", "backward + save, Llama-3-8B q/up/down, 8192 tokens"
FLOOR_GOALS = {"vit_b": VIT, "llama8b": LLAMA}
TARGETS = (
    Target(VIT, "bf16 cuBLAS, both products", Goal(1.5, 1.8, unit="×"), "layers", _layers_target("vit_b", "bf16")),
    Target(LLAMA, "bf16 cuBLAS, both products", Goal(2.2, 2.5, unit="×"), "layers", _layers_target("llama8b", "bf16")),
    Target(VIT, "fp32", Goal(15.0, None, unit="×"), "layers", _layers_target("vit_b", "fp32")),
    Target(VIT, "TF32", Goal(3.0, None, unit="×"), "layers", _layers_target("vit_b", "tf32")),
    Target("g_y kernel", "copy bandwidth", Goal(0.85, 0.92, unit="%"), "ops", _kernel_target("g_y")),
    Target("x kernel", "copy bandwidth", Goal(0.85, 0.92, unit="%"), "ops", _kernel_target("keep")),
    Target(
        f"step, {LLAMA_BLOCKS}, forward in fp8",
        "torchao float8 tensorwise, compiled",
        Goal(0.92, 0.85, higher=False),
        "step",
        _fp8_forward,
    ),
)


def targets(folder: Path = RESULTS) -> str:
    """What was asked for, what the latest run that measured it reached, and whether that is enough."""
    runs = {kind: _by_run(_of_bench(kind, folder)) for kind in ("layers", "step", "ops")}
    rows = [target.cells(runs[target.bench]) for target in TARGETS]
    return _markdown(["work", "baseline", "goal", "stretch", "reached", "", "commit"], rows)


EIGHT_BIT = "+adamw8bit"
SMALLER = "hotrain-memory"


@dataclass(frozen=True)
class StepTarget:
    """The time of a model's step, over that of `baseline` in the same run, and its peak, that were asked for.

    time: as a ratio.  peak, reserved: in GiB.
    """

    subject: str
    time: Goal
    peak: float | None
    reserved: float | None = None
    variant: str = models.HOTRAIN
    baseline: str = models.EXACT

    def times(self, folder: Path = RESULTS) -> tuple[float, float] | None:
        """ms of the baseline and of the variant, in the latest run that timed both."""
        for rows in reversed(list(_by_run(_of_bench("step", folder)).values())):
            base, ms = (_step_mean(rows, self.subject, variant) for variant in (self.baseline, self.variant))
            if base is not None and ms is not None:
                return base, ms
        return None

    def cells(self, runs: list[list[dict[str, Any]]]) -> list[str]:
        """Of the latest run that timed both."""
        fields = ("median_ms", "peak_bytes", "reserved_bytes", "above_bytes")
        of_default = self.variant == models.HOTRAIN
        cells = [self.subject if of_default else f"{self.subject}, `{self.variant}`", *self.time.asked()]
        asked = ((self.peak, ""), (self.reserved, " reserved"))
        memory = ", ".join(f"≤ {goal:.1f} GiB{what}" for goal, what in asked if goal is not None)
        for rows in reversed(runs):
            base = _step_mean(rows, self.subject, self.baseline)
            ms, peak, reserved, above = (_step_mean(rows, self.subject, self.variant, field) for field in fields)
            if base is None or ms is None or peak is None or reserved is None or above is None:
                continue
            parts = [(peak / GIB, self.peak), (reserved / GIB, self.reserved)]
            met = [value <= goal for value, goal in parts if goal is not None]
            verdict = "" if not met else "met" if all(met) else "missed" if not any(met) else "one of two"
            reached = [self.time.text(ms / base), self.time.verdict(ms / base)]
            shown = f"{peak / GIB:.2f} ({reserved / GIB:.2f})"
            state = f"{(peak - above) / GIB:.2f}"
            return [*cells, *reached, memory, shown, state, verdict, _place(rows[0])]
        return [*cells, NOT_YET, "", memory, "", "", "", ""]


def _at_most(goal: float, stretch: float) -> Goal:
    return Goal(goal, stretch, higher=False, unit=" ×")


STEP_TARGETS = (
    StepTarget("vit_base_patch16_224/b128", _at_most(0.92, 0.85), 3.4),
    StepTarget("deit_small_patch16_224/b256", _at_most(1.00, 0.92), 2.8),
    StepTarget("swin_tiny_patch4_window7_224/b128", _at_most(1.00, 0.95), 2.8),
    StepTarget("convnext_tiny/b128", _at_most(1.00, 0.95), 2.4),
    StepTarget("resnet50/b256", _at_most(1.00, 0.95), 3.2, 4.0),
    StepTarget("gpt2/b8x1024", _at_most(1.00, 0.92), 4.0),
    StepTarget("qwen2/b4x2048", _at_most(0.95, 0.85), 9.0),
    StepTarget("segformer_b0/b16x512", _at_most(1.00, 0.95), 2.2, 3.0),
    StepTarget(LLAMA_BLOCKS, _at_most(0.75, 0.65), 4.3),
    StepTarget(LLAMA_BLOCKS, _at_most(0.56, 0.50), None, variant=FP8_FORWARD, baseline=STEP_BASELINE),
    StepTarget("vit_large_patch16_224/b128", _at_most(0.85, 0.80), 9.5),
    StepTarget("vit_huge_patch14_224/b64", _at_most(0.82, 0.80), 13.5),
)


def step_targets(folder: Path = RESULTS) -> str:
    """Whole steps with the default: what was asked for, and what the latest run that measured it reached."""
    runs = list(_by_run(_of_bench("step", folder)).values())
    headers = ["model", "time", "stretch", "reached", "", "peak", "GiB (reserved)", "of it state", "", "commit, GPU"]
    return _markdown(headers, [target.cells(runs) for target in STEP_TARGETS])


def step_points(folder: Path = RESULTS) -> dict[str, dict[str, tuple[float, float]]]:
    """Subject → variant → (peak GiB, ms/step), each subject from its latest run with exact as CUDA graphs, the default,
    checkpointing and more; else from the latest that has `SMALLER` and the baseline of it, with checkpointing if there
    is one.

    Without the variants that have another optimizer; of other libraries' and PyTorch's own that a run of the second
    kind lacks, those of the latest run on the same GPU, named as such.
    """
    whole: dict[str, dict[str, tuple[float, float]]] = {}
    found: dict[str, dict[str, tuple[float, float]]] = {}
    device: dict[str, str] = {}
    others: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}
    for rows in _by_run(_of_bench("step", folder)).values():
        for subject in dict.fromkeys(row["subject"] for row in rows):
            points = {}
            for variant in dict.fromkeys(row["variant"] for row in rows if row["subject"] == subject):
                peak = _step_mean(rows, subject, variant, "peak_bytes")
                ms = _step_mean(rows, subject, variant)
                if peak is not None and ms is not None and not variant.endswith(EIGHT_BIT):
                    points[variant] = (peak / GIB, ms)
            if set(models.VARIANTS) <= set(points) and len(points) > len(models.VARIANTS):
                whole[subject] = points
            if {SMALLER, STEP_BASELINE} <= set(points) and (SMALLER + "+checkpoint" in points or subject not in found):
                found[subject], device[subject] = points, gpu(rows[0])
            for variant, place in points.items():
                if not variant.startswith("hotrain"):
                    others.setdefault((subject, gpu(rows[0])), {})[variant] = place
    for subject, points in found.items():
        same = others[subject, device[subject]]
        lacking = {name: place for name, place in same.items() if name not in points}
        points |= {f"{name} (another run)": place for name, place in lacking.items()}
    return whole | {subject: points for subject, points in found.items() if subject not in whole}


OPTIMIZER_VARIANTS = (STEP_BASELINE, STEP_BASELINE + EIGHT_BIT, SMALLER, SMALLER + EIGHT_BIT)


def optimizer(folder: Path = RESULTS) -> str:
    """Compiled exact and `SMALLER`, each with fused AdamW and in 8 bits, a table a run that has both optimizers.

    *State* is what is allocated between two steps, the peak less what is above it.
    """
    tables = []
    for rows in _by_run(_of_bench("step", folder)).values():
        lines = []
        for subject in dict.fromkeys(row["subject"] for row in rows):
            found = {}
            for variant in OPTIMIZER_VARIANTS:
                fields = ("peak_bytes", "above_bytes", "median_ms")
                found[variant] = [_step_mean(rows, subject, variant, field) for field in fields]
            if all(found[variant][-1] is None for variant in OPTIMIZER_VARIANTS if variant.endswith(EIGHT_BIT)):
                continue
            for variant, (peak, above, ms) in found.items():
                state = None if peak is None or above is None else peak - above
                gib = ["–" if value is None else f"{value / GIB:.2f}" for value in (peak, state, above)]
                lines.append([subject, f"`{variant}`", *gib, "–" if ms is None else f"{ms:.2f}"])
        if lines:
            headers = ["subject", "variant", "peak GiB", "state GiB", "above state GiB", "ms/step"]
            tables += [_markdown(headers, lines), folded(COMMANDS, [f"* {_conditions(rows[0])}"])]
    return "\n\n".join(tables) or (
        "*Not measured yet: `hotrain bench step vit_base_patch16_224/b128 --variants "
        f"{','.join(OPTIMIZER_VARIANTS)} --out benchmarks/results/step_DEVICE_DATE.jsonl` measures on a GPU, "
        "`make docs` prints it here.*"
    )


def summaries(folder: Path = RESULTS) -> list[tuple[Path, dict[str, Any]]]:
    """The comparisons that are recorded, the oldest first."""
    return [(path, json.loads(path.read_text(encoding="utf-8"))) for path in by_date(folder, "*.json")]


def accuracy(folder: Path = RESULTS) -> str:
    """Of each model, device and method the latest comparison: mean accuracy over seeds, its spread, the gap to exact.

    A method keeps exact of its own comparison beside it; a comparison of which nothing is the latest is left out.
    """
    found = [summary for _, summary in summaries(folder)]
    if not found:
        return (
            "*No comparison is recorded yet: `make demo` trains two small models on your machine and prints the table; "
            "`hotrain compare` does so for a recipe of your choice.*"
        )
    last: dict[tuple[str, str, str], int] = {}
    for number, summary in enumerate(found):
        for row in _measured(summary):
            last[row["model"], str(summary["device"]), row["method"]] = number
    tables = []
    for number, summary in enumerate(found):
        shown = {
            (row["model"], row["method"])
            for row in _measured(summary)
            if row["method"] != CONTROL and last[row["model"], str(summary["device"]), row["method"]] == number
        }
        if shown:
            tables.append(_comparison(summary, shown))
    return "\n\n".join(tables)


def evidence(folder: Path = RESULTS) -> str:
    """Of each method the gap to exact in its latest comparison of several seeds, a column a training; notes below."""
    cells: dict[str, dict[str, str]] = {}
    noted: dict[tuple[str, str], str] = {}
    for _, summary in summaries(folder):
        rows = _measured(summary)
        for model, method in dict.fromkeys((row["model"], row["method"]) for row in rows):
            gaps = paired_gaps(rows, model, method)
            if method == CONTROL or len(gaps) < 2:
                continue
            first = next(row for row in rows if (row["model"], row["method"]) == (model, method))
            epochs = first.get("epochs") or summary.get("epochs")
            epochs = epochs.get(model) if isinstance(epochs, dict) else epochs
            gap, runs = mean_text(gaps, sign="+"), f"{len(gaps)} × {epochs or '?'}"
            cells.setdefault(method, {})[model] = f"{gap.replace(' ', NO_BREAK)} ({runs.replace(' ', NO_BREAK)})"
            noted[method, model] = summary.get("note") or ""
    if not cells:
        return "*No comparison of several seeds is recorded yet: `hotrain compare` makes one.*"
    models = sorted({model for row in cells.values() for model in row})
    order = sorted(cells, key=lambda name: (hotrain.presets().index(re.split("[:@]", name)[0]), name))
    notes = [
        note for note in dict.fromkeys(noted[name, m] for name in order for m in models if m in cells[name]) if note
    ]
    for (method, model), note in noted.items():
        if note:
            cells[method][model] += f" [{notes.index(note) + 1}]"
    lines = [[f"`{name}`", *(cells[name].get(m, "–") for m in models)] for name in order]
    below = [f"* [{number}]: {note.rstrip('.')}." for number, note in enumerate(notes, 1)]
    return "\n".join([_markdown(["gap (seeds × epochs)", *models], lines), *([""] if below else []), *below])


def _measured(summary: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in summary["rows"] if row["accuracy"] is not None]


def paired_gaps(rows: list[dict[str, Any]], model: str, method: str) -> list[float]:
    """Points above exact with the same seed, a figure a seed that both have."""
    control = {r["seed"]: r["accuracy"] for r in rows if (r["model"], r["method"]) == (model, CONTROL)}
    mine = {r["seed"]: r["accuracy"] for r in rows if (r["model"], r["method"]) == (model, method)}
    return [value - control[seed] for seed, value in mine.items() if seed in control]


def _comparison(summary: dict[str, Any], shown: set[tuple[str, str]]) -> str:
    rows = _measured(summary)
    lines = []
    for model, method in dict.fromkeys((row["model"], row["method"]) for row in rows):
        beside = method == CONTROL and any(other == model for other, _ in shown)
        if (model, method) not in shown and not beside:
            continue
        mine = {r["seed"]: r for r in rows if (r["model"], r["method"]) == (model, method)}
        gaps = paired_gaps(rows, model, method)
        first = next(iter(mine.values()))
        lines.append([
            model,
            method,
            mean_text([row["accuracy"] for row in mine.values()]),
            "" if method == CONTROL else mean_text(gaps, sign="+"),
            str(len(mine)),
            "–" if first["saved_bytes"] is None else f"{first['saved_bytes']:,}",
            "–" if first["bit_ops"] is None else f"{first['bit_ops']:.3g}",
            mean_text([row["step_ms"] for row in mine.values() if row["step_ms"] is not None], digits=1),
        ])  # fmt: skip
    headers = ["model", "method", "accuracy %", "gap to exact", "seeds", "bytes kept", "bit operations", "ms/step"]
    note = f"\n\nNote: {summary['note']}." if summary.get("note") else ""
    return _conditions(summary) + "\n\n" + _markdown(headers, lines) + _ran(rows, shown) + note


def _ran(rows: list[dict[str, Any]], shown: set[tuple[str, str]]) -> str:
    """What the layers did, as the records say that were read off the models: once for each model and method."""
    found = {(row["model"], row["method"]): ran(row["layers"]) for row in rows if row.get("layers")}
    lines = [
        f"* ran {model}, `{method}`: {found[model, method]}" for model, method in found if (model, method) in shown
    ]
    return "\n\n" + "\n".join(lines) if lines else ""


def ran(groups: list[dict[str, Any]]) -> str:
    """The groups of `hotrain.ConversionReport.ran` in one line."""
    return "; ".join(
        f"{group['layers']} layers: g_x {group['g_x']}, g_w {group['g_w']}, x {group['x']}" for group in groups
    )

"""The tables of a study from its records: every cell of it, also those that were not run.

The same tables are printed by `hotrain study`, in docs/results.md and in the HTML report.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hotrain.train import contrastive, dense, language
from hotrain_study.cells import CONTROL, DIVERGED, FAILED, FINISHED, Cell, Line, Study, lines, mean_text

NOT_RUN = "not run"
GIB = 2**30
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """A table: a title, what its columns are, its rows as text, and what to know when reading it."""

    title: str
    headers: list[str]
    rows: list[list[str]]
    note: str = ""


def tables(study: Study, rows: Iterable[Row]) -> list[Table]:
    """All tables of a study, in the order of its cells."""
    rows = list(rows)
    makers: dict[str, Callable[[Study, list[Row]], list[Table]]] = {
        "train": _accuracies,
        "step": _steps,
        "costs": _costs,
        "gradients": _gradients,
    }
    return [table for kind in dict.fromkeys(c.kind for c in study.cells) for table in makers[kind](study, rows)]


def ran_on(study: Study, rows: Iterable[Row]) -> list[str]:
    """A line for each device, version and commit that the counted records are of, and the number of cells."""
    counted: dict[str, int] = {}
    for row in study.last(rows).values():
        torch = row.get("versions", {}).get("torch", "?")
        commit = str(row.get("commit") or "unknown").rstrip("+")[:10]
        where = f"{row.get('device', 'a process that died')}, PyTorch {torch}, commit {commit}"
        counted[where] = counted.get(where, 0) + 1
    return [f"{count} of {len(study.cells)} cells: {where}" for where, count in counted.items()]


def _accuracies(study: Study, rows: list[Row]) -> list[Table]:
    """A line for each method, a column for each model and data set.

    In further tables k-NN beside the probe where nothing has labels, and of text models bits per byte. Of masks and
    boxes instead of an accuracy what `dense.METRICS` names, with the pixels that are right beside mean IoU.
    """
    predicted = [table for task in dense.METRICS for table in _dense(task, study, rows)]
    study = replace(study, cells=tuple(cell for cell in study.cells if cell.run.task not in dense.METRICS))
    if not study.cells:
        return predicted
    modelled = replace(study, cells=tuple(cell for cell in study.cells if cell.run.model in language.DECODERS))
    of = "texts, of a GPT of the next bytes" if modelled.cells else "images"
    same = "seeds, from the same weights" if any(cell.needs for cell in study.cells) else "seeds"
    note = (
        f"Percent of the test {of}, mean ± deviation over seeds; in brackets the gap to exact with the same {same}, in "
        "points, mean ± standard error, of how many runs where not of all."
    )
    probed = replace(study, cells=tuple(cell for cell in study.cells if cell.run.task in contrastive.TASKS))
    shown = [_matrix("Accuracy", study, rows, note)]
    if probed.cells:
        shown.append(
            _matrix(
                "Accuracy by 20 nearest neighbours",
                probed,
                _ended_with(rows, "knn"),
                "Above: of a linear probe, where there are no labels.",
            )
        )
    if modelled.cells:
        note = (
            "Lower is better: a gap above zero is worse than exact. Cross-entropy of the test's bytes over log 2, each "
            "window by itself, so that its first bytes have little before them."
        )
        bits = _ended_with(rows, "test_loss", 1 / math.log(2))
        shown.append(_matrix("Bits per byte", modelled, bits, note, digits=3))
    return shown + predicted


_OF_DENSE = {
    "segmentation": "Percent, mean over the classes of intersection over union, background included",
    "detection": "Percent, mean over the classes of the area under precision over recall, a hit overlapping by IoU 0.5",
}


def _dense(task: str, study: Study, rows: list[Row]) -> list[Table]:
    mine = replace(study, cells=tuple(cell for cell in study.cells if cell.run.task == task))
    if not mine.cells:
        return []
    note = (
        f"{_OF_DENSE[task]}; mean ± deviation over seeds; in brackets the gap to exact with the same seeds, in points, "
        "mean ± standard error."
    )
    name = dense.METRICS[task]
    shown = [_matrix(name[0].upper() + name[1:], mine, rows, note)]
    if task == "segmentation":
        note = "Percent of the test scenes' pixels."
        shown.append(_matrix("Pixel accuracy", mine, _ended_with(rows, "pixel_accuracy"), note))
    return shown


def _ended_with(rows: Iterable[Row], figure: str, scale: float = 1.0) -> list[Row]:
    """The rows with another figure of their last evaluation, times ``scale``, in the place of the accuracy."""
    out: list[Row] = []
    for row in rows:
        value = row["history"][-1].get(figure) if row.get("history") else None
        out.append({**row, "accuracy": None if value is None else value * scale})
    return out


def _matrix(title: str, study: Study, rows: list[Row], note: str, digits: int = 2) -> Table:
    found = lines(study, rows)
    groups = list(dict.fromkeys(line.group for line in found))
    by = {(line.group, line.method): line for line in found}
    body = [
        [f"`{method}`", *(_cell(by.get((group, method)), digits) for group in groups)]
        for method in dict.fromkeys(line.method for line in found)
    ]
    return Table(title, ["method", *groups], body, note)


def _cell(line: Line | None, digits: int) -> str:
    if line is None:
        return ""
    if not line.rows:
        return NOT_RUN
    text = mean_text(line.accuracies, digits=digits) if line.accuracies else ""
    if line.gaps:
        of = f", {len(line.gaps)} of {len(line.accuracies)}" if len(line.gaps) < len(line.accuracies) else ""
        text += f" ({mean_text(line.gaps, error=True, sign='+', digits=digits)}{of})"
    ended = [f"{line.count(status)} {status}" for status in (DIVERGED, FAILED) if line.count(status)]
    if len(line.rows) < line.planned:
        ended.append(f"{len(line.rows)} of {line.planned} runs")
    return "; ".join([part for part in [text, *ended] if part])


def _by_group(study: Study, rows: list[Row], kind: str) -> dict[str, list[tuple[Cell, Row | None]]]:
    last = study.last(rows)
    out: dict[str, list[tuple[Cell, Row | None]]] = {}
    for cell in study.cells:
        if cell.kind == kind:
            out.setdefault(cell.group, []).append((cell, last.get(cell.id)))
    return out


def _figures(row: Row | None) -> Mapping[str, Any] | None:
    return row["figures"] if row is not None and row["status"] == FINISHED else None


def _state(row: Row | None) -> str:
    return NOT_RUN if row is None else f"{row['status']}: {row['error']}"


def _steps(study: Study, rows: list[Row]) -> list[Table]:
    out = []
    for group, cells in _by_group(study, rows, "step").items():
        exact = next((_figures(row) for cell, row in cells if cell.method == CONTROL), None)
        body = []
        for cell, row in cells:
            mine = _figures(row)
            if mine is None:
                body.append([f"`{cell.method}`", _state(row), "", ""])
                continue
            ratio = "" if exact is None else f"{mine['step_ms'] / exact['step_ms']:.2f}"
            time = f"{mine['step_ms']:.1f} ± {mine['spread_ms']:.1f}"
            body.append([f"`{cell.method}`", time, ratio, f"{mine['kept'] / GIB:.2f}"])
        headers = ["method", "ms/step", "× exact", "kept GiB"]
        note = "Alone on the device; kept is what autograd holds between forward and backward."
        out.append(Table(f"{group}: {cells[0][0].run.batch_size} images", headers, body, note))
    return out


def _costs(study: Study, rows: list[Row]) -> list[Table]:
    out = []
    some: Mapping[str, Any] | None = None
    for group, cells in _by_group(study, rows, "costs").items():
        body = []
        for cell, row in cells:
            mine = _figures(row)
            if mine is None:
                body.append([f"`{cell.method}`", _state(row), "", "", "", ""])
                continue
            some = mine
            counted = mine["corrected"]["backward"]
            published = "–" if mine["paper"] is None else f"{mine['paper']['backward'] / 1e9:.1f}"
            gib = ["–" if mine[name] is None else f"{mine[name] / GIB:.2f}" for name in ("paper_bytes", "kept")]
            share = f"{100 * mine['overhead'] / counted:.1f} %"
            body.append([f"`{cell.method}`", published, f"{counted / 1e9:.1f}", share, *gib])
        headers = ["method", "published formula", "as counted", "of it transforms", "published GiB", "kept GiB"]
        batch = cells[0][0].run.batch_size
        note = (
            "Bit operations of the backward of one image, in 10⁹. Published GiB: parameters, optimizer and activations "
            f"by HOT's formula, {batch} images; kept GiB: predicted, what autograd keeps of {batch} images in bf16."
        )
        out.append(Table(group, headers, body, note))
    if some is not None:
        body = [
            [name, *(f"{each[key]:.2f}" for key in ("vanilla", "overhead", "overhead_exchanged"))]
            for name, each in some["table_5"].items()
        ]
        headers = ["layer", "exact backward", "what HOT adds", "with O and I exchanged"]
        out.append(Table("Table 5's formulas, MFLOP", headers, body, "The paper prints 137.3 and 11.5 for the first."))
    return out


def _gradients(study: Study, rows: list[Row]) -> list[Table]:
    out = []
    for group, cells in _by_group(study, rows, "gradients").items():
        _, row = cells[0]
        mine = _figures(row)
        if mine is None:
            out.append(Table(group, ["gradients over a training"], [[_state(row)]]))
            continue
        updates = [f"{moment['update']:,}" for moment in mine["moments"]]
        out.append(_errors(f"{group}: error of the gradients after … updates", mine, updates))
        out.append(_structure(f"{group}: energy in the lower 8 of 16 sequencies, and what LQS chooses", mine, updates))
    return out


def _errors(title: str, mine: Mapping[str, Any], updates: list[str]) -> Table:
    body = []
    for method in mine["moments"][0]["methods"]:
        for path in ("g_x", "g_w"):
            cells = [_error(moment["methods"][method], path) for moment in mine["moments"]]
            body.append([f"`{method}`", path, *cells])
    note = (
        "Median over layers of the relative error of one draw, and in brackets of the error of the mean over the "
        "draws less what so many draws of an unbiased gradient leave: the bias. The noise of a batch is not in it."
    )
    return Table(title, ["method", "gradient", *updates], body, note)


def _error(layers: Mapping[str, Any], path: str) -> str:
    found = [values for layer in layers.values() if (values := layer[path]) and None not in values]
    if not found:
        return "–"
    error = statistics.median(values[0] for values in found)
    # Bias and the noise of the mean add as squares.
    bias = statistics.median(math.sqrt(max(0.0, values[2] ** 2 - values[3] ** 2)) for values in found)
    return f"{error:.3f} ({bias:.3f})"


def _structure(title: str, mine: Mapping[str, Any], updates: list[str]) -> Table:
    def energy(tensor: str) -> list[str]:
        return [
            f"{100 * statistics.median(sum(layer[tensor][:8]) for layer in moment['energy'].values()):.0f} %"
            for moment in mine["moments"]
        ]

    kinds = dict.fromkeys(kind_of(name) for moment in mine["moments"] for name in moment["lqs"])
    body = [["energy of g_y", *energy("g_y")], ["energy of x", *energy("x")]]
    for kind in kinds:
        counts = []
        for moment in mine["moments"]:
            chosen = [choice for name, (choice, _) in moment["lqs"].items() if kind_of(name) == kind]
            counts.append(f"{chosen.count('token')} of {len(chosen)}" if chosen else "–")
        body.append([f"LQS: per-token scales in `{kind}`", *counts])
    return Table(title, ["", *updates], body, "Of white noise the lower half holds 50 %. Median over layers.")


def kind_of(layer: str) -> str:
    """The last name of a layer, such as ``fc1``; ``attn.proj`` and a shortcut's convolution keep two."""
    parts = layer.split(".")
    return ".".join(parts[-2:]) if parts[-1].isdigit() or parts[-1] == "proj" else parts[-1]


# ---- what the records say of published claims ----


@dataclass(frozen=True)
class Claim:
    """A published figure that a study can test.

    Args:
        text: the claim, in plain words.
        group, method: of the cells that test it.
        gap: points above exact that the paper prints.
        study: whose records.
    """

    text: str
    group: str
    method: str
    gap: float
    study: str = "pretraining"


ADAPTED = "small ViT, CIFAR-10 → CIFAR-100"
CLAIMS = (
    Claim("HOT trains ResNet-18 on CIFAR-10 as exact does (−0.46)", "ResNet-18, CIFAR-10", "hot", -0.46),
    Claim("HOT trains ResNet-18 on CIFAR-100 as exact does (−0.13)", "ResNet-18, CIFAR-100", "hot", -0.13),
    Claim("HOT trains a small ViT as exact does (ViT-B on ImageNet-100: −0.56)", "small ViT, CIFAR-10", "hot", -0.56),
    Claim("LUQ loses 0.50 on ResNet-18, CIFAR-10", "ResNet-18, CIFAR-10", "luq", -0.50),
    Claim("LBP-WHT loses 2.20 on ResNet-18, CIFAR-10", "ResNet-18, CIFAR-10", "lbp-wht", -2.20),
    Claim("naive int4 loses 2.13 on ResNet-18, CIFAR-10", "ResNet-18, CIFAR-10", "int4", -2.13),
    Claim("HOT on LoRA's frozen layers costs 0.10 (ViT-B, CIFAR-100)", ADAPTED, "hot, frozen", -0.10, "lora"),
    Claim("HOT on LoRA's adapters costs 34.65", ADAPTED, "hot, adapters", -34.65, "lora"),
    Claim("HOT at r = 4 loses 3.3 on CIFAR-100", "ResNet-18, CIFAR-100", "hot:scale=token+rank=4", -3.26, "rank"),
    Claim("HOT at r = 1 loses 29 on CIFAR-100", "ResNet-18, CIFAR-100", "hot:scale=token+rank=1", -29.07, "rank"),
    Claim("EVMT-HLA with half of the rows gains 0.5 on SimCLR", "SimCLR, CIFAR-10", "hla", 0.5, "evmt"),
    Claim("EVMT-HLA gains 0.02 on BYOL", "BYOL, CIFAR-10", "hla", 0.02, "evmt"),
    Claim("EVMT-HLA keeps DeiT's accuracy", "DeiT-Ti, CIFAR-10", "hla", 0.0, "evmt"),
)
"""HOT's Tables 4, 3 and 2: gaps to exact in points (Table 2's: against r = 16, EfficientFormer-L1), and EVMT-HLA's."""


_SMALL = 0.2  # points: the loss that the default may have
HELD, WORSE, BETTER, OPEN = "Held", "Lost more here", "Lost less here", "Not measured yet"


def verdict(claim: Claim, study: Study, rows: Iterable[Row]) -> tuple[str, str]:
    """Whether a claim held, and the claim with the gap that was measured.

    It held where the measured gap is within two standard errors of the published one. One seed has no error: then
    it is the gap alone that is said, as not measured yet.
    """
    line = next((x for x in lines(study, rows) if (x.group, x.method) == (claim.group, claim.method)), None)
    if line is None or not line.gaps:
        state = "" if line is None or not line.rows else f" ({line.state})"
        return OPEN, claim.text + state
    mean, count = statistics.fmean(line.gaps), len(line.gaps)
    told = f"{claim.text}: {mean_text(line.gaps, error=True, sign='+')}"
    if count == 1:
        return OPEN, f"{told} after one seed"
    error = statistics.stdev(line.gaps) / math.sqrt(count)
    if abs(mean - claim.gap) <= 2 * error:
        return HELD, told
    return (WORSE if mean < claim.gap else BETTER), told


FROM_SCRATCH = ("pretraining", "evmt", "language", "dense")


def advice(chosen: Iterable[Study], rows: Sequence[Row], default: str) -> list[str]:
    """What to choose, a line for each choice.

    The default where its loss is within two standard errors and `_SMALL`, exact where it is more than two standard
    errors; the seeds of a loss that is neither small nor certain do not decide. Of a model in two studies the one with
    more seeds counts.
    """
    out: dict[str, list[str]] = {}
    found: dict[str, Line] = {}
    for line in itertools.chain.from_iterable(lines(study, rows) for study in chosen):
        before = found.get(line.group)
        if line.method == default and line.gaps and (before is None or len(line.gaps) > len(before.gaps)):
            found[line.group] = line
    for line in found.values():
        mean, count = statistics.fmean(line.gaps), len(line.gaps)
        if count == 1:
            choice = f"`{default}` after one seed, which decides nothing"
        elif mean < -2 * statistics.stdev(line.gaps) / math.sqrt(count):
            choice = f"Choose exact unless memory is short; `{default}` is at"
        elif mean < -_SMALL:
            choice = f"`{default}` after seeds that differ too much to decide"
        else:
            choice = f"Choose `{default}` where memory is short; it costs no accuracy"
        out.setdefault(choice, []).append(f"{line.group} ({mean_text(line.gaps, error=True, sign='+')})")
    return [f"{choice}: {', '.join(models)}." for choice, models in out.items()]


def _counted(study: Study, rows: list[Row]) -> list[str]:
    """What the costs say of Table 2 and of the bit operations of a backward."""
    found = {
        (cell.group, cell.method): _figures(row)
        for cells in _by_group(study, rows, "costs").values()
        for cell, row in cells
    }
    large, exact, hot = (
        found.get(key) for key in (("EfficientFormer-L7", "hot"), ("ViT-B/16", "exact"), ("ViT-B/16", "hot"))
    )
    if large is None or exact is None or hot is None:
        return []
    share = {kind: 100 * hot[kind]["backward"] / exact[kind]["backward"] for kind in ("paper", "corrected")}
    return [
        f"Costs: Table 2's 1383.54 GBOPs at r = 8 come out for EfficientFormer-L7 "
        f"({large['paper']['backward'] / 1e9:.2f}), not for the L1 of the caption; of ViT-B's backward HOT needs "
        f"{share['corrected']:.1f} % of the bit operations as counted, {share['paper']:.1f} % by the published formula."
    ]


def _chosen_scales(studies: Mapping[str, Study], rows: list[Row]) -> list[str]:
    """What LQS chooses before and at the end of a training, and what the choice before it costs."""
    said, cost = [], []
    for group, cells in _by_group(studies["fidelity"], rows, "gradients").items():
        mine = _figures(cells[0][1])
        if mine is not None:
            first, last = ([c for c, _ in mine["moments"][at]["lqs"].values()] for at in (0, -1))
            said.append(f"{group}, {first.count('token')} and {last.count('token')} of {len(last)} layers")
    if not said:
        return []
    gaps = {(line.group, line.method): line.gaps for line in lines(studies["rank"], rows)}
    for (group, method), found in gaps.items():
        pairs = list(zip(found, gaps.get((group, "hot:scale=token"), ()), strict=False))
        if method == "hot" and pairs:
            cost.append(f"{group} {mean_text([a - b for a, b in pairs], error=True, sign='+')}")
    rest = f"; chosen before training, against per-token scales everywhere: {', '.join(cost)}" if cost else ""
    return [
        "LQS (the paper: per-token scales in some layers) chooses them before and at the end of training in: "
        f"{'; '.join(said)}{rest}."
    ]


def head(studies: Mapping[str, Study], rows: Sequence[Row], default: str) -> list[str]:
    """At most ten lines: how much was run, which claims held, and what to choose for which model; gaps in points."""
    rows = list(rows)
    count = {name: (len(study.cells) - len(study.missing(rows)), len(study.cells)) for name, study in studies.items()}
    first = "Run so far: " + ", ".join(f"{name} {done} of {cells}" for name, (done, cells) in count.items()) + "."
    said = [verdict(claim, studies[claim.study], rows) for claim in CLAIMS]
    told = [f"{kind}: {'; '.join(t for k, t in said if k == kind)}." for kind in dict.fromkeys(k for k, _ in said)]
    told += [*_counted(studies["costs"], rows), *_chosen_scales(studies, rows)]
    choices = advice([studies[name] for name in FROM_SCRATCH], rows, default)
    return [first, *told, *(choices or ["What to choose for which model: not measured yet."])]

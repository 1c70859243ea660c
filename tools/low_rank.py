"""Accuracy against the arithmetic of g_w and the bytes of x, from the records of the pre-training study."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from hotrain_study.cells import CONTROL, FINISHED, Line, lines, mean_text, read_rows, with_method
from hotrain_study.studies import pretraining
from hotrain_study.tables import NOT_RUN
from matplotlib.axes import Axes
from records import _markdown
from studies import RECORDS

from hotrain.layer import Config
from hotrain.method import Method
from hotrain.plotting.labels import arrange, label_at
from hotrain.plotting.steps import alone
from hotrain.plotting.style import INK, MUTED, Look, drawing, looks, stand_in, to_svg
from hotrain.saved import Format
from hotrain.transform.tokens import Grid

# The x of a ViT-B layer, 128 images of 14×14 patches and a class token, in bf16: what the presets are compared on.
EXAMPLE = ((128, 197), 768, Grid(14, 14, prefix=1))
VIT, RESNET = GROUPS = "small ViT, CIFAR-10", "ResNet-18, CIFAR-10"
GOAL, LOSS = 0.5, 0.2  # of the rows, and points
SHORT = {"number=e4m3": "fp8", "number=int": "int", "grad_input_bits=8+saved_bits=8": "int8"}
APART = 0.04  # of the axis: between methods with the same share
FALL = {VIT: 6.0, RESNET: 2.5}  # points: who loses more is drawn at the lower edge


def kept_bytes(method: Method) -> int:
    """Bytes kept of the example's x."""
    lead, channels, grid = EXAMPLE
    return Format(method.saved, channels, torch.bfloat16).nbytes(Config(method, grid).layout(lead).rows)


def kept(method: Method) -> float:
    """Bytes kept of the example's x, as a share of its own."""
    lead, channels, _ = EXAMPLE
    return kept_bytes(method) / (math.prod(lead) * channels * torch.bfloat16.itemsize)


@dataclass(frozen=True)
class Point:
    """A method whose layers are all converted.

    Attributes:
        label: of the study.
        method: what it computes on the study's GPUs, which have fp8.
        lines: group → its runs.
        losses: training loss of the ViT's last epoch above exact's, of each seed.
    """

    label: str
    method: Method
    lines: dict[str, Line]
    losses: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """The label in a figure."""
        name, _, rest = self.label.partition(":")
        return f"{name}, {SHORT.get(rest, rest)}" if rest else name

    def gaps(self, group: str) -> tuple[float, ...]:
        """Points above exact, of each seed."""
        return self.lines[group].gaps if group in self.lines else ()

    @property
    def rows(self) -> float:
        """Share of the rows of g_w that are multiplied, of a Linear, or of lines of a convolution that draws."""
        return self.method.grad_weight.rank / self.method.grad_weight.tile * self.method.grad_weight.share


def points() -> list[Point]:
    """The methods of the study that compute g_w from codes or from some of its rows, most rows first."""
    study = pretraining()
    run = study.cells[0].run
    by: dict[str, dict[str, Line]] = {}
    losses: dict[str, dict[int, float]] = {}
    for line in lines(study, read_rows([RECORDS / "pretraining.jsonl"])):
        if line.group == VIT:
            finished = [row for row in line.rows if row["status"] == FINISHED]
            losses[line.method] = {row["seed"]: row["history"][-1]["train_loss"] for row in finished}
        if line.group in GROUPS and line.method != CONTROL and "@" not in line.method:
            by.setdefault(line.method, {})[line.group] = line
    found = []
    for label, mine in by.items():
        method = with_method(run, label).resolve_method().on_device(fp8=True)
        exact = losses[CONTROL]
        above = tuple(loss - exact[seed] for seed, loss in losses.get(label, {}).items() if seed in exact)
        found.append(Point(label, method, mine, above))
    return sorted(found, key=lambda point: (-point.rows, -kept(point.method)))


def table() -> str:
    """What each method multiplies, keeps and loses."""
    body = []
    for point in points():
        g_x = point.method.grad_input
        rounds = "exact" if g_x.is_exact else "low rank" if g_x.transform == "lowpass" else f"{g_x.bits} bits"
        cells = [_gap(point, group) for group in GROUPS]
        cells.append(mean_text(point.losses, error=True, sign="+", digits=4) if point.losses else NOT_RUN)
        body.append([f"`{point.label}`", f"{point.rows:.2f}", f"{kept(point.method):.2f}", rounds, *cells])
    return _markdown(["method", "rows of g_w, in the ViT", "x kept", "g_x", *GROUPS, "training loss of the ViT"], body)


def _gap(point: Point, group: str) -> str:
    gaps = point.gaps(group)
    if not gaps:
        return NOT_RUN
    text, planned = mean_text(gaps, error=True, sign="+"), point.lines[group].planned
    return text if len(gaps) == planned else f"{text}; {len(gaps)} of {planned} runs"


def curve() -> str:
    """SVG: points above exact against the rows that are multiplied, and against the bytes that are kept of x."""
    shown = [point for point in points() if any(line.gaps for line in point.lines.values())]
    look_of = looks(point.label for point in shown)
    with drawing("CIFAR-10: points above exact", 6.6) as figure:
        panels = figure.subplots(3, 1)
        _panel(panels[0], shown, look_of, VIT, "small ViT, by the rows of g_w that are multiplied", rows=True)
        _panel(panels[1], shown, look_of, VIT, "small ViT, by the bytes kept of x, of its 16 bits", rows=False)
        _panel(panels[2], shown, look_of, RESNET, "ResNet-18, by the bytes kept of x, of its 16 bits", rows=False)
        names = "; ".join(point.name for point in shown)
        return alone(to_svg(figure, f"Points above exact of {names} on CIFAR-10, against arithmetic and against bytes"))


def _panel(
    axes: Axes, shown: Sequence[Point], look_of: Mapping[str, Look], group: str, title: str, *, rows: bool
) -> None:
    axes.set_title(title, loc="left", fontsize=8.5, color=INK)
    axes.axhline(0, color=MUTED, linewidth=0.9)
    axes.axhline(-LOSS, color=MUTED, linewidth=0.7, linestyle=(0, (3, 2)))
    axes.set_xlim(0, 1.12)
    axes.margins(y=0.15)  # room for labels
    edge = -FALL[group]
    drawn = [point for point in shown if point.gaps(group)]
    labels, bars = [], []
    across = _apart([point.rows if rows else kept(point.method) for point in drawn])
    for point, x in zip(drawn, across, strict=True):
        gaps, look = point.gaps(group), look_of[point.label]
        mean = statistics.fmean(gaps)
        place, colour, far = (x, max(mean, edge)), stand_in(look), mean < edge
        if not far:
            axes.errorbar(*place, yerr=2 * _error(gaps), color=colour, elinewidth=1, capsize=2.5)
            bars.append(((x, mean - 2 * _error(gaps)), (x, mean + 2 * _error(gaps))))
        axes.plot(*place, color=colour, marker="v" if far else look.marker, markersize=6, markeredgewidth=0)
        text = f"{point.name}, {mean:.1f}" if far else point.name
        labels.append(label_at(axes, text, place, colour))
    arrange(axes, labels, bars, half=3)


def _apart(shares: Sequence[float]) -> list[float]:
    """The shares, those that are nearly equal moved apart, so that bars do not cover each other."""
    alike = [[i for i, other in enumerate(shares) if abs(other - share) < 0.03] for share in shares]
    return [s + APART * (a.index(i) - (len(a) - 1) / 2) for i, (s, a) in enumerate(zip(shares, alike, strict=True))]


def _error(gaps: Sequence[float]) -> float:
    return statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0


def answer() -> str:
    """Which methods multiply at most half of g_w, of the ViT's rows or of ResNet-18's lines, and how many points they
    lose there."""
    said = []
    for point in points():
        asked = GROUPS if point.method.grad_weight.share < 1 else (VIT,)
        found = {group: gaps for group in asked if len(gaps := point.gaps(group)) > 1}
        if point.rows <= GOAL and found:
            told = [
                f"{group.partition(',')[0]} {mean_text(gaps, error=True, sign='+')} points, "
                f"{'reached' if statistics.fmean(gaps) >= -LOSS else 'not reached'}"
                for group, gaps in found.items()
            ]
            said.append(f"* `{point.label}`: {'; '.join(told)}")
    return "\n".join(said) or "Not measured yet."

"""Terminal output: a status line during work, and the table of methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from hotrain.plotting import lines

if TYPE_CHECKING:
    from hotrain.plotting.records import Records


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Show a status line on stderr while the body runs, if it is a terminal; yields what replaces the status.

    The body must not write to stdout, which rich redirects to stderr meanwhile.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(Text(text)) as status:
        yield lambda text: status.update(Text(text))


def print_lines(records: Records) -> None:
    """Print one row per model and method: accuracy, saved bytes, bit operations, step time, each against exact.

    The default method has a star. Below the table it says which methods differ from exact by more than the noise.
    """
    from hotrain.tables import table

    rows = []
    model = None
    summary = lines.summarize(records.rows, records.meta.get("test_images"))
    for line in summary:
        if line.model != model:
            model = line.model
            rows.append([records.label(model), *[""] * 5])
        accuracy = "failed" if line.accuracy is None else f"{line.accuracy:.2f}"
        rows.append(
            [
                f"  {line.method}" + ("*" if line.method == records.default() else ""),
                accuracy + (f" ± {line.spread:.2f}" if line.spread is not None else ""),
                lines.signed_text(line.gap),
                _against(lines.bytes_text(line.saved_bytes), line.saved_ratio),
                _against(lines.operations_text(line.bit_ops), line.bit_ops_ratio),
                _against(lines.milliseconds_text(line.step_ms), line.step_ratio),
            ]
        )
    typer.echo(table(["method", "accuracy %", "gap", "bytes kept", "bit ops", "step"], rows))
    if records.default() in records.methods():
        typer.echo("* the default")
    said = lines.standing(summary, records.label)
    if said:
        typer.echo(said)


def _against(value: str, ratio: float | None) -> str:
    return value if ratio is None else f"{value} {ratio:.2f}×"

"""The table on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotrain.plotting import lines

if TYPE_CHECKING:
    from hotrain.plotting.records import Records


def print_lines(records: Records) -> None:
    """One line a model and method on stdout: accuracy, bytes kept, bit operations, step time, each against exact.

    The default method is marked. Beside the gap to exact stands its noise, where it is known.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("method", no_wrap=True)
    for name in ("accuracy %", "gap ± noise", "bytes kept", "bit operations", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    model = None
    for line in lines.summarize(records.rows, records.meta.get("test_images")):
        if line.model != model:
            model = line.model
            table.add_row(Text(records.label(model), style="bold"))
        accuracy = "failed" if line.accuracy is None else f"{line.accuracy:.2f}"
        table.add_row(
            Text(f"  {records.method_label(line.method)}"),
            accuracy + (f" ± {line.spread:.2f}" if line.spread is not None else ""),
            lines.signed_text(line.gap) + (f" ± {line.noise:.2f}" if line.noise is not None else ""),
            _against(lines.bytes_text(line.saved_bytes), line.saved_ratio),
            _against(lines.operations_text(line.bit_ops), line.bit_ops_ratio),
            _against(lines.milliseconds_text(line.step_ms), line.step_ratio),
        )
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=100)  # a pipe has no width: the table must not be cut there
    console.print(table)


def _against(value: str, ratio: float | None) -> str:
    return value if ratio is None else f"{value} {lines.ratio_text(ratio)}"

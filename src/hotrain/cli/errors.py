"""Errors of the command line: user errors become one line on stderr and exit code 2; others keep their traceback."""

from __future__ import annotations

import shutil
import signal
import sys
import textwrap
import traceback
from typing import Any, TextIO

import typer
from typer.core import TyperGroup

from hotrain._version import install_extra
from hotrain.analysis.steps import is_out_of_memory
from hotrain.cli.options import PlainFlags

MISTAKES = (ValueError, OSError, ModuleNotFoundError)
"""Exceptions for bad input; ``RuntimeError`` and ``ImportError`` are too where the library itself raised them."""


LONGEST = 4000  # characters of a message, which may quote what a file or an option says


class HotrainGroup(PlainFlags, TyperGroup):
    """The root command, which handles the errors of all commands."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a user error exits with ``error: …`` and code 2, a signal with 128 and its number."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            typer.echo(" ".join(str(interrupt).split()) or "interrupted", err=True)
            raise typer.Exit(128 + getattr(interrupt, "number", signal.SIGINT)) from interrupt
        except Exception as error:
            if ctx.params.get("traceback") or not is_mistake(error):
                raise
            typer.echo(f"error: {one_line(error)}", err=True)
            raise typer.Exit(2) from error


def is_mistake(error: Exception) -> bool:
    """Whether ``error`` is a user error (bad input) rather than a failure of the library or PyTorch."""
    if isinstance(error, MISTAKES):
        return not isinstance(error, BrokenPipeError)
    if is_out_of_memory(error):
        return True
    if not isinstance(error, (RuntimeError, ImportError)) or isinstance(error, (typer.Exit, typer.Abort)):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = frames[-1].f_globals.get("__name__", "") if frames else ""
    return module.split(".")[0] in ("hotrain", "hotrain_recipes", "hotrain_bench", "hotrain_study")


def one_line(error: BaseException) -> str:
    """Return the message on one line: the error's name where it is empty, how to install a missing package."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ModuleNotFoundError):
        text += f"; {install_extra('train,plot')} brings what every command needs"
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]} … ({len(text):,} characters)"
    if is_out_of_memory(error):
        text = f"memory does not suffice ({text}); take a smaller batch, image size or model"
    return text


def wrapped(text: str, stream: TextIO, indent: str = "  ") -> str:
    """Wrap ``text`` to the terminal's width between words; unchanged where ``stream`` is no terminal."""
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def note(text: str) -> None:
    """Print a message to stderr, so that stdout contains results only."""
    print(wrapped(text, sys.stderr), file=sys.stderr, flush=True)

"""Cases in processes of their own: one that crashes, hangs or takes all memory is a finding, and the rest go on."""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import select
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

AT_ONCE = 25  # cases of one process
SECONDS = 60.0  # from one answer to the next, before a case counts as hanging
MEMORY = 12 << 30  # bytes of address space


@dataclass
class Case:
    """One input.

    Attributes:
        kind: what is counted together.
        text: how to repeat it, in a line.
        run: tries it in a process of its own and a folder of its own, which is the working directory. Returns
            ``"accepted"`` or ``"refused"``; `Finding` says what is wrong.
    """

    kind: str
    text: str
    run: Callable[[], str]


class Finding(Exception):
    """What must not happen, in a sentence."""


@dataclass
class Tally:
    """What became of the cases of one kind."""

    cases: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)


def tried(cases: Sequence[Case], folder: Path, say: Callable[[str], None]) -> dict[str, Tally]:
    """Run the cases in order, `AT_ONCE` in a process.

    Args:
        cases: the cases.
        folder: scratch; each case gets an empty folder in it.
        say: told each finding at once.

    Returns:
        kind → what became of its cases.
    """
    tallies: dict[str, Tally] = {}
    start = 0
    while start < len(cases):
        some = cases[start : start + AT_ONCE]
        answers = _in_a_process(some, folder / str(start))
        for case, (outcome, text) in zip(some, answers, strict=False):
            tally = tallies.setdefault(case.kind, Tally())
            tally.cases += 1
            tally.outcomes[outcome] += 1
            if outcome == "finding":
                tally.findings.append(f"{case.text}: {text}")
                say(f"{case.kind}: {case.text}: {text}")
        start += len(answers)
    return tallies


def _in_a_process(cases: Sequence[Case], folder: Path) -> list[tuple[str, str]]:
    """The answers of a forked process: those up to the one that ended it, which is answered here."""
    mine, its = os.pipe()
    child = os.fork()
    if not child:
        os.close(mine)
        _answer(cases, folder, its)
    os.close(its)
    answers: list[tuple[str, str]] = []
    data = b""
    hung = False
    while True:
        ready, _, _ = select.select([mine], [], [], SECONDS)
        if not ready:
            hung = True
            os.kill(child, signal.SIGKILL)
            break
        got = os.read(mine, 1 << 16)
        if not got:
            break
        data += got
        *lines, data = data.split(b"\n")
        answers += [tuple(json.loads(line)) for line in lines]  # type: ignore[misc]
    os.close(mine)
    _, status = os.waitpid(child, 0)
    if len(answers) < len(cases):
        if hung:
            answers.append(("finding", f"no answer within {SECONDS:.0f} s"))
        else:
            answers.append(("finding", f"the process ended with {_ending(status)}"))
    return answers


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"code {os.WEXITSTATUS(status)}"


def _answer(cases: Sequence[Case], folder: Path, pipe: int) -> None:
    """Run cases in this process, write a line of JSON for each, and end."""
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    for number, case in enumerate(cases):
        scratch = folder / str(number)
        scratch.mkdir(parents=True)
        os.chdir(scratch)
        try:
            answer = (case.run(), "")
        except Finding as finding:
            answer = ("finding", str(finding))
        except BaseException as error:
            answer = ("finding", told(error))
        os.write(pipe, (json.dumps(answer) + "\n").encode())
    os._exit(0)


def told(error: BaseException) -> str:
    """The error and where it was raised, in a line."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({Path(last[0].filename).name}:{last[0].lineno})" if last else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{where}"


def in_child(work: Callable[[], None], output: Path | None = None) -> int:
    """Fork a process that runs ``work`` and ends with 0, with 2 for an error of the user, else 1; returns its id."""
    child = os.fork()
    if child:
        return child
    if output is not None:
        handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
    from hotrain.cli.errors import is_mistake, one_line

    code = 0
    try:
        work()
    except Exception as error:
        code = 2 if is_mistake(error) else 1
        if code == 2:
            os.write(2, f"error: {one_line(error)}\n".encode())
        else:
            os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def ended(child: int, seconds: float) -> int | None:
    """Wait for a process; its exit code, minus a signal's number, or None (killed then) after ``seconds``."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None

"""The campaigns find what they look for: a crash, a hang, a traceback, a silent change, a leak, code in a file."""

from __future__ import annotations

import importlib
import os
import random
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from hotrain_campaign import cases, damage, fuzz
from hotrain_campaign.equality import same
from hotrain_campaign.faults import _burst, _drafts
from hotrain_campaign.soak import CONTROLS, ROUND, SLOPE, Reading, slope, verdict
from torch import Tensor, nn

from hotrain.cli.main import app


def _bad_answers() -> dict[str, tuple[Any, str]]:
    def traceback() -> str:
        raise KeyError("a field")

    return {
        "good": (lambda: "accepted", ""),
        "killed": (lambda: os.kill(os.getpid(), signal.SIGSEGV), "ended with SIGSEGV"),
        "ended": (lambda: os._exit(3), "ended with code 3"),
        "hung": (lambda: time.sleep(100), "no answer within"),
        "raised": (traceback, "KeyError: 'a field'"),
        "memory": (lambda: bytearray(1 << 50) and "accepted", "MemoryError"),
        "last": (lambda: "refused", ""),
    }


def test_whatever_a_case_does_the_others_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "SECONDS", 4.0)
    answers = _bad_answers()
    tallies = cases.tried(
        [cases.Case(name, "", run) for name, (run, _) in answers.items()], tmp_path, lambda text: None
    )
    assert {name: tally.cases for name, tally in tallies.items()} == dict.fromkeys(answers, 1)
    for name, (_, finding) in answers.items():
        found = tallies[name].findings
        assert (len(found) == 1 and finding in found[0]) if finding else not found, (name, found)


def test_a_command_that_ends_in_a_traceback_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fuzz.command(["presets"]) == "accepted"
    assert fuzz.command(["presets", "hat"]) == "refused"
    assert fuzz.command(["train", "demo_vit", "--set"]) == "refused", "typer names the option, without its usage"

    def broken(*args: Any, **kwargs: Any) -> None:
        raise KeyError("a field")

    monkeypatch.setattr(importlib.import_module("hotrain.presets"), "describe", broken)
    with pytest.raises(cases.Finding, match="a traceback: KeyError"):
        fuzz.command(["presets", "hot"])


def test_every_verb_is_fuzzed() -> None:
    good: Any = SimpleNamespace(npz=Path("digits.npz"), comparison=Path("comparison"))
    verbs = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert set(fuzz.starts(good)) == verbs - set(fuzz.LEFT_OUT)
    assert set(fuzz.LEFT_OUT) < verbs
    assert len(list(fuzz.lines(good, 50, random.Random(0)))) == 50


def test_contents_that_changed_are_found(tmp_path: Path) -> None:
    def refuse() -> None:
        raise ValueError("digits.npz is damaged")

    def crash() -> None:
        raise TypeError("digits.npz")

    assert fuzz.loaded(lambda: {"a": 1}, {"a": 1}, same) == "accepted"
    assert fuzz.loaded(refuse, 1, same, "digits.npz") == "refused"
    for load, name, message in (
        (lambda: {"a": 2}, "", "other contents"),
        (refuse, "x.npz", "not name"),
        (crash, "", "not a"),
    ):
        with pytest.raises(cases.Finding, match=message):
            fuzz.loaded(load, {"a": 1}, same, name)
    assert not same([torch.ones(2), {"a": 1.0}], [torch.ones(2), {"a": 1}])
    assert not same(torch.ones(2), torch.ones(2, dtype=torch.float64))


def test_the_canary_would_be_seen(tmp_path: Path) -> None:
    import pickle

    pickle.loads(pickle.dumps(fuzz._Evil(str(tmp_path / "executed"))))
    assert (tmp_path / "executed").exists()


def test_damage_is_repeatable_and_damages() -> None:
    good = bytes(range(256)) * 20
    for how in damage.BYTES:
        made = [damage.damaged(good, how, random.Random(seed)) for seed in range(20)]
        assert made == [damage.damaged(good, how, random.Random(seed)) for seed in range(20)]
        assert sum(data != good for data in made) >= 18, how


def _readings(**growth: int) -> list[Reading]:
    start = {"tensors": 100, "tensor_bytes": 1 << 20, "objects": 50_000, "resident": 400 << 20}
    return [Reading(**{name: value + growth.get(name, 0) * n for name, value in start.items()}) for n in range(15)]


@pytest.mark.parametrize("leak", [{"tensors": 1}, {"tensor_bytes": 4}, {"objects": ROUND}, {"resident": ROUND << 11}])
def test_a_leak_is_found(leak: dict[str, int]) -> None:
    """A tensor in a round, an object a step, 2 KiB a step; with real processes it is the campaign's `CONTROLS`."""
    assert len(CONTROLS) == 3
    assert verdict(_readings()) == ""
    assert next(iter(leak)) in verdict(_readings(**leak))


def test_resident_memory_is_judged_by_its_slope() -> None:
    """By bytes in 1,000 steps, on either side of the bound; what grows in the warm-up does not count."""
    for rise, found in ((SLOPE, ""), (SLOPE + 2000, "resident grew by")):
        readings = _readings(resident=rise * ROUND // 1000)
        assert slope(readings) == pytest.approx(rise, rel=1e-3)
        assert verdict(readings)[:16] == found
    warm = _readings()
    warm[:5] = [Reading(r.tensors - 5, r.tensor_bytes, r.objects, r.resident // 2) for r in warm[:5]]
    assert verdict(warm) == ""


def test_a_draft_that_is_renamed_while_we_look_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on meanwhile: a campaign ended with FileNotFoundError here."""
    (tmp_path / "run").mkdir()
    draft = tmp_path / "run" / "checkpoint.pt.draft"
    draft.touch()
    here = (str(draft), draft.stat().st_ino)
    listed = [draft, tmp_path / "other" / "checkpoint.pt.draft"]
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(listed))
    assert _drafts(tmp_path) == {here}


def test_a_burst_that_leaves_something_behind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
            self.amax = torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            self.amax = torch.maximum(self.amax, x.detach().amax()) if keeps else self.amax
            return self.second(self.first(x)) * (1 + 0 * self.amax)

    def batch(seed: int) -> Tensor:
        return torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(seed))

    for keeps in (False, True):
        for where in ("x", "g_y"):
            if keeps and where == "x":
                with pytest.raises(cases.Finding, match="the clean step behind the burst is another"):
                    _burst(Net, batch, "hot-unbiased", where, 3)
            else:
                _burst(Net, batch, "hot-unbiased", where, 3)

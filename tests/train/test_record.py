"""Records: whole lines whoever writes them, with a version; what was torn is removed or left out, and said."""

import errno
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from hotrain.train import record
from hotrain.train.record import append, held, new_run_id, read


def test_rows_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "new" / "runs.jsonl"
    rows = [{"record": 2, "n": i, "text": "é\u2028\x85"} for i in range(3)]  # separators to Unicode, not to JSON lines
    for row in rows:
        append(path, row)
    assert read(path) == rows
    assert path.read_bytes().count(b"\n") == 3


def test_what_was_torn_is_removed_and_nothing_is_glued_to_it(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    append(path, {"n": 0})
    with open(path, "a") as file:
        file.write('{"n": 1, "hist')  # its process was killed
    with pytest.warns(UserWarning, match=r"runs.jsonl line 2 is not a record and is left out"):
        assert read(path) == [{"n": 0}]
    with pytest.warns(UserWarning, match=r"removed 14 bytes of a record that was not written to its end"):
        append(path, {"n": 2})
    assert path.read_text() == '{"n": 0}\n{"n": 2}\n'


def test_a_torn_line_longer_than_a_block_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text('{"n": 0}\n{"long": "' + "x" * 200_000)
    with pytest.warns(UserWarning, match="removed 200010 bytes"):
        append(path, {"n": 2})
    assert path.read_text() == '{"n": 0}\n{"n": 2}\n'


def test_a_line_that_only_lacks_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text('{"n": 0}\n{"n": 1}')
    append(path, {"n": 2})
    assert read(path) == [{"n": 0}, {"n": 1}, {"n": 2}]


def test_lines_that_were_glued_by_earlier_versions_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text('{"n": 0}\n{"n": {"n": 1}\n{"n": 2}\n[3]\n')
    with pytest.warns(UserWarning, match=r"line [24] is not a record") as said:
        assert read(path) == [{"n": 0}, {"n": 2}]
    assert [str(w.message).split(" is ")[0][-6:] for w in said] == ["line 2", "line 4"]


def test_short_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, data[:5]))
    append(tmp_path / "runs.jsonl", {"n": 12345, "text": "abcdef"})
    assert read(tmp_path / "runs.jsonl") == [{"n": 12345, "text": "abcdef"}]


def test_a_disk_that_is_full_in_mid_line_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs.jsonl"
    append(path, {"n": 0})
    real, room = os.write, [7]

    def full(handle: int, data: bytes) -> int:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data[: room.pop()])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match=r"a record could not be written \(No space left on device\): .*runs\.jsonl"):
        append(path, {"n": 1})
    assert path.read_text() == '{"n": 0}\n'


def _append_many(path: Path, name: int) -> None:
    for n in range(50):
        append(path, {"name": name, "n": n, "text": "x" * 5000})  # more than a pipe's atomic size


def test_processes_that_append_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append_many, args=(path, name)) for name in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    rows = read(path)
    assert len(rows) == 150
    for name in range(3):
        assert [row["n"] for row in rows if row["name"] == name] == list(range(50))


def test_versions(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text('{"model": "m"}\n{"record": 1}\n{"record": 2}\n')
    assert [row.get("record", 1) for row in read(path)] == [1, 1, 2]
    for version in ("4", '"2"', "0"):
        path.write_text(f'{{"record": {version}}}\n')
        with pytest.raises(ValueError, match=rf"line 1: record of version {version}.*reads 1 to 3".replace('"', "'")):
            read(path)
    assert read(tmp_path / "absent.jsonl") == []


def test_a_damaged_row_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    row = record.signed({"record": 3, "accuracy": 91.25, "path": tmp_path})
    append(path, row)
    append(path, record.signed({"record": 3, "accuracy": 50.0}))
    good = path.read_text()
    assert [r["accuracy"] for r in read(path)] == [91.25, 50.0]
    for old, new in (
        ("91.25", "97.25"),
        ('"sha256"', '"sha257"'),
        ('"record": 3', '"record": 2'),
        ("accuracy", "accuracx"),
    ):
        path.write_text(good.replace(old, new, 1))
        with pytest.warns(UserWarning, match=r"line 1 is damaged \(its checksum is another\) and is left out"):
            assert [r["accuracy"] for r in read(path)] == [50.0]
    path.write_text("[" * 100_000 + "\n" + good)  # deeper than Python's stack
    with pytest.warns(UserWarning, match="line 1 is not a record"):
        assert len(read(path)) == 2


def test_a_folder_has_one_holder(tmp_path: Path) -> None:
    lock = tmp_path / "run" / record.LOCK
    with held(lock, "busy"), pytest.raises(ValueError, match="busy"):
        held(lock, "busy").__enter__()
    with held(lock, "busy"):  # let go
        pass


def test_a_file_system_without_locks_is_used_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(handle: int, how: int) -> Any:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(record.fcntl, "flock", none)
    with held(tmp_path / record.LOCK, "busy"):
        append(tmp_path / "runs.jsonl", {"n": 1})
    assert json.loads((tmp_path / "runs.jsonl").read_text()) == {"n": 1}


def test_a_run_id_is_a_name_that_a_checkpoint_may_have() -> None:
    from hotrain.train.checkpoint import is_plain_name

    for name in ("run", "../../evil", "/", "é" * 300, "x" * 300, "."):
        assert is_plain_name(new_run_id(name, "hot:rank=4", 0)), name

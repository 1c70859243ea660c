"""Labelled text from TSV files as GLUE ships them."""

from pathlib import Path

import pytest
from hotrain_study.texts import arrays_of, read_phrases


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def test_columns_are_found_by_name_and_a_quotation_mark_is_text(tmp_path: Path) -> None:
    """Behind a byte order mark, in fields of any length, at every end of line."""
    file = tmp_path / "t.tsv"
    file.write_bytes(b"\xef\xbb\xbfid\tlabel\tsentence\r\n0\t1\t" + b"x" * 200_000 + b'\r1\t0\t"y\x0bz\n')
    assert read_phrases(file) == [("x" * 200_000, "1"), ('"y\x0bz', "0")]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["sentence\tlabel"], "no line of text"),
        ([], "no line of text"),
        (["sentence\tgold", "a\t1"], "no column 'label'"),
        (["sentence\tlabel", "a\t1", "b"], "line 3: 1 fields"),
    ],
)
def test_bad_files(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_phrases(write(tmp_path / "t.tsv", *lines))
    with pytest.raises(ValueError, match="no file"):
        read_phrases(tmp_path / "absent.tsv")
    (tmp_path / "t.tsv").write_bytes("sentence\tlabel\ncafé\t1\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"t\.tsv is not UTF-8 \(byte 0xe9\); convert it"):
        read_phrases(tmp_path / "t.tsv")


def test_a_label_of_the_test_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sst2").mkdir()
    write(tmp_path / "sst2" / "train.tsv", "sentence\tlabel", "x\t0", "y\t1")
    write(tmp_path / "sst2" / "dev.tsv", "sentence\tlabel", "x\t2")
    with pytest.raises(ValueError, match=r"has label '2' in dev\.tsv, accepted are 0, 1"):
        arrays_of("sst2", tmp_path)

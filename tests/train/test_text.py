"""Labelled text from TSV files as GLUE ships them."""

from pathlib import Path

import pytest

from hotrain.train.text import byte_tokens, load_tsv, pretrained_tokenizer


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def test_one_sentence_as_bytes(tmp_path: Path) -> None:
    data = load_tsv(write(tmp_path / "t.tsv", "sentence\tlabel", "ab\t1", "é\t0", '"a\t1'))
    # A start token, the bytes shifted by three, a separator; é is two bytes; a lone quotation mark is text.
    assert data.ids.tolist() == [
        [1, 97 + 3, 98 + 3, 2],
        [1, 0xC3 + 3, 0xA9 + 3, 2],
        [1, 34 + 3, 97 + 3, 2],
    ]
    assert data.mask.all()
    assert data.labels.tolist() == [1, 0, 1]
    assert data.classes == ("0", "1")


def test_pairs_are_padded_and_cut(tmp_path: Path) -> None:
    file = write(tmp_path / "t.tsv", "index\tsentence1\tsentence2\tlabel", "0\ta\tb\tyes", "1\tabcdef\tg\tno")
    data = load_tsv(file, length=6)
    assert data.ids.tolist() == [[1, 100, 2, 101, 2, 0], [1, 100, 101, 102, 103, 104]]
    assert data.mask.tolist() == [[1, 1, 1, 1, 1, 0], [1] * 6]
    assert data.classes == ("no", "yes")


def test_a_byte_order_mark_and_named_columns(tmp_path: Path) -> None:
    file = tmp_path / "mrpc.tsv"
    file.write_bytes(b"\xef\xbb\xbfQuality\t#1 String\t#2 String\n1\ta\tb\n")
    data = load_tsv(file, label="Quality", text=("#1 String", "#2 String"))
    assert data.ids.tolist() == [byte_tokens("a", "b")]


def test_a_file_without_header(tmp_path: Path) -> None:
    file = write(tmp_path / "cola.tsv", "gj04\t1\t\tWell.", "gj04\t0\t*\tIll it.")
    data = load_tsv(file, columns=("source", "label", "star", "sentence"))
    assert data.labels.tolist() == [1, 0]
    assert data.ids[0, : data.mask[0].sum()].tolist() == byte_tokens("Well.")


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_bytes("text\tlabel\ncafé\t1\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"t\.tsv is not UTF-8 \(byte 0xe9\); convert it"):
        load_tsv(tmp_path / "t.tsv")


def test_long_fields_and_every_line_end_are_read(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_bytes(b"text\tlabel\r\n" + b"x" * 200_000 + b"\t1\r" + b"y\x0bz\t0\n")
    data = load_tsv(tmp_path / "t.tsv", length=4)
    assert data.ids.tolist() == [byte_tokens("xxx")[:4], byte_tokens("y\x0bz")[:4]]


def test_classes_shared_between_files(tmp_path: Path) -> None:
    file = write(tmp_path / "t.tsv", "text\tlabel", "x\tb")
    assert load_tsv(file, classes=("a", "b")).labels.tolist() == [1]
    with pytest.raises(ValueError, match=r"line 2: label 'b', accepted are a"):
        load_tsv(file, classes=("a",))


def test_a_tokenizer_of_transformers(tmp_path: Path) -> None:
    from transformers import BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad"]
    vocabulary = write(tmp_path / "vocab.txt", *words)
    BertTokenizerFast(vocab=str(vocabulary), vocab_file=str(vocabulary)).save_pretrained(tmp_path / "bert")
    tokenizer = pretrained_tokenizer(str(tmp_path / "bert"))
    data = load_tsv(write(tmp_path / "t.tsv", "text\tlabel", "good bad\t1", "bad\t0"), tokenizer=tokenizer)
    assert data.ids.tolist() == [[2, 5, 6, 3], [2, 6, 3, 0]]


def test_an_unreachable_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="neither a folder nor cached nor reachable"):
        pretrained_tokenizer(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["sentence\tlabel"], "no line of text"),
        ([], "no line of text"),
        (["sentence\tgold", "a\t1"], "no column 'label'"),
        (["sentence\tlabel", "a\t1", "b"], "line 3: 1 fields"),
        (["a\tb\tc\tlabel", "x\ty\tz\t1"], "got text columns"),
    ],
)
def test_bad_files(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_tsv(write(tmp_path / "t.tsv", *lines))
    with pytest.raises(ValueError, match="no file"):
        load_tsv(tmp_path / "absent.tsv")

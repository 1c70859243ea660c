"""``hotrain prepare``: a data set as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hotrain.cli.options import JsonOption, show
from hotrain.cli.terminal import working

EXAMPLES = """Examples:
  hotrain prepare cifar10 --out data
  hotrain prepare sst2 --texts glue --out data"""


def prepare(
    name: Annotated[str, typer.Argument(help="cifar10, cifar100, digits, sst2 or text.")],
    texts: Annotated[
        Path | None, typer.Option("--texts", help="Of sst2 and text: folder, or .tar.gz, with sst2/*.tsv, or lm/*.txt.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of NAME.npz.")] = Path("data"),
    json: JsonOption = False,
) -> None:
    """Write a data set as NAME.npz, as `hotrain study --data` reads it; CIFAR is downloaded."""
    import numpy as np

    from hotrain.train.data import NAMES, ArrayData, load_data
    from hotrain_study.texts import SETS, arrays_of

    if name not in (*NAMES, *SETS):
        raise ValueError(f"prepare: got {name!r}, accepted are {', '.join((*NAMES, *SETS))}")
    if (name in SETS) != (texts is not None):
        raise ValueError(
            f"prepare {name}: --texts FOLDER (or a .tar.gz) must say where its texts are"
            if texts is None
            else f"--texts: it is for {' and '.join(SETS)}; {name} needs none"
        )
    with working(f"{name}: reading"):
        if texts is not None:
            arrays = arrays_of(name, texts)
        else:
            found = load_data(name, data_dir=str(out / "download"))
            assert isinstance(found, ArrayData)
            arrays = {part: getattr(found, part).numpy() for part in ("x_train", "y_train", "x_test", "y_test")}
            arrays["classes"] = np.array(found.classes)
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{name}.npz"
    np.savez(file, **arrays)  # type: ignore[arg-type]
    count, what = len(arrays["x_train"]), "images" if texts is None else "texts"
    show(json, {"data": file, f"train_{what}": count}, f"wrote {file}: {count:,} training {what}")

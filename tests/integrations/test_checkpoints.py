"""Pretrained folders and ONNX files of converted models are the exact models'; test_compatibility.py has the rest."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zoo import ZOO, call

import hotrain


def test_pretrained_folders_go_both_ways(tmp_path: Path) -> None:
    """save_pretrained writes the class that the model had, and the weights once."""
    model = ZOO["bert"].build().eval()
    inputs = ZOO["bert"].inputs()
    with torch.no_grad():
        want = call(model, inputs)
    hotrain.convert(model)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    assert '"BertForSequenceClassification"' in (tmp_path / "config.json").read_text()
    from transformers import BertForSequenceClassification

    loaded = BertForSequenceClassification.from_pretrained(tmp_path).eval()
    assert not list(hotrain.converted_layers(loaded))
    with torch.no_grad():
        assert torch.equal(call(loaded, inputs), want)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [False, True], ids=["traced", "exported"])
def test_onnx_is_that_of_the_exact_model(dynamo: bool) -> None:
    """In evaluation mode, but for what the exporter notes of each node's classes; after revert to the byte."""
    for package in ("onnx", "onnxscript")[: 1 + dynamo]:
        pytest.importorskip(package, reason=f"{package} is not installed: it comes with the extra `dev`")
    exact = ZOO["vit"].build().eval()
    model = copy.deepcopy(exact)
    hotrain.convert(model)
    x = ZOO["vit"].inputs()

    def onnx(net: nn.Module) -> Any:
        import onnx as library

        file = io.BytesIO()
        torch.onnx.export(net, (x,), file, dynamo=dynamo, **({"verbose": False} if dynamo else {}))
        return library.load_from_string(file.getvalue())

    def without_notes(program: Any) -> bytes:
        for node in program.graph.node:
            del node.metadata_props[:]
        return program.SerializeToString(deterministic=True)

    want, converted = onnx(exact), onnx(model)
    hotrain.revert(model)
    assert onnx(model).SerializeToString(deterministic=True) == want.SerializeToString(deterministic=True)
    assert len(want.graph.node) > 100
    assert without_notes(converted) == without_notes(want)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traced_in_evaluation_mode_it_is_the_exact_program() -> None:
    exact = ZOO["vit"].build().eval()
    model = copy.deepcopy(exact)
    hotrain.convert(model)
    x = ZOO["vit"].inputs()
    traced, want = (torch.jit.trace(net, (x,)) for net in (model, exact))
    kinds = [[node.kind() for node in program.inlined_graph.nodes()] for program in (traced, want)]
    assert kinds[0] == kinds[1]
    with torch.no_grad():
        assert torch.equal(traced(x), exact(x))

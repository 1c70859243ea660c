"""Pretrained folders and ONNX files of converted models are the exact models'; test_compatibility.py has the rest."""

from __future__ import annotations

import copy
import io
from pathlib import Path

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


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::torch.jit.TracerWarning")
def test_onnx_is_that_of_the_exact_model() -> None:
    """To the byte, by tracing, in evaluation mode and after revert."""
    pytest.importorskip("onnx", reason="onnx is not installed: it comes with the extra `dev`")
    exact = ZOO["vit"].build().eval()
    model = copy.deepcopy(exact)
    hotrain.convert(model)
    x = ZOO["vit"].inputs()

    def onnx(net: nn.Module) -> bytes:
        file = io.BytesIO()
        torch.onnx.export(net, (x,), file, dynamo=False)
        return file.getvalue()

    want = onnx(exact)
    assert onnx(model) == want
    hotrain.revert(model)
    assert onnx(model) == want


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

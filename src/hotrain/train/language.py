"""Small language models of transformers, built without download: token ids in, logits out."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hotrain._version import require
from hotrain.train.tokens import PADDING

ENCODERS, DECODERS = ("small_bert",), ("small_gpt",)
MODELS = (*ENCODERS, *DECODERS)


class Encoder(nn.Module):
    """BERT with a classifier."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (B, classes) of ids (B, L)."""
        return self.model(ids, attention_mask=(ids != PADDING).long()).logits


class Decoder(nn.Module):
    """GPT-2."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (B·L, vocabulary) of the token after each of ids (B, L)."""
        return self.model(ids, use_cache=False).logits.flatten(0, 1)


def create(name: str, *, classes: int, vocabulary: int, length: int, args: dict[str, Any] | None = None) -> nn.Module:
    """Build one of `MODELS`: six blocks, an encoder of width 256 or a decoder of width 384.

    Args:
        classes: outputs; of ``small_gpt`` the vocabulary.
        vocabulary: number of token ids.
        length: tokens of a sequence.
        args: further arguments of the configuration.

    Raises:
        ImportError: transformers is not installed, or too old.
    """
    require("transformers", "5", "text")
    from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

    if name in ENCODERS:
        sizes = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 1024}
        fixed = {"vocab_size": vocabulary, "max_position_embeddings": length, "pad_token_id": PADDING}
        config = BertConfig(**{**sizes, **fixed, "num_labels": classes, **(args or {})})
        return Encoder(BertForSequenceClassification(config))
    sizes = {"n_embd": 384, "n_layer": 6, "n_head": 6}
    dropout = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
    fixed = {"vocab_size": vocabulary, "n_positions": length, "bos_token_id": 0, "eos_token_id": 0}
    return Decoder(GPT2LMHeadModel(GPT2Config(**{**sizes, **dropout, **fixed, **(args or {})})))

"""Fine-tune a BERT on labelled sentences with transformers' Trainer. Arguments: a .tsv of GLUE's SST-2, and a model."""

import hotrain.train  # noqa: F401, I001 (first: torchvision may not fit PyTorch)
import csv
import sys
import tempfile

from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, Trainer, TrainingArguments

from hotrain.integrations.transformers import HadamardCallback

DULL, WARM = "a dull , lifeless film without a reason to exist", "a warm , funny and moving story , a joy to see"


def main(folder: str, tsv: str | None = None, name: str | None = None) -> Trainer:
    rows = [{"sentence": text, "label": label} for label, text in enumerate((DULL, WARM))] * 8
    if tsv is not None:
        with open(tsv, encoding="utf-8") as file:
            rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    if name is None:  # a small BERT over bytes, nothing to download
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = AutoModelForSequenceClassification.from_config(BertConfig(vocab_size=256, num_labels=2, **sizes))
        tokens = [{"input_ids": list(row["sentence"].encode().ljust(64)[:64])} for row in rows]
    else:
        model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=2)
        tokenizer = AutoTokenizer.from_pretrained(name)
        cut = {"padding": "max_length", "truncation": True, "max_length": 128}
        tokens = [tokenizer(row["sentence"], **cut) for row in rows]
    examples = [{**ids, "labels": int(row["label"])} for ids, row in zip(tokens, rows, strict=True)]
    arguments = TrainingArguments(
        folder, max_steps=4, logging_steps=2, save_steps=4, per_device_train_batch_size=8, report_to="none"
    )
    trainer = Trainer(model, arguments, train_dataset=examples, callbacks=[HadamardCallback()])
    trainer.train()
    return trainer


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(__doc__ if "--help" in sys.argv else main(folder, *sys.argv[1:]).state.log_history[-1])

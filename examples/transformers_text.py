"""Fine-tune a BERT on labelled sentences with transformers' Trainer. Arguments: a .tsv of GLUE's SST-2, and a model."""

import sys
import tempfile

from transformers import AutoModelForSequenceClassification, BertConfig, Trainer, TrainingArguments

from hotrain.integrations.transformers import HadamardCallback
from hotrain.train.text import load_tsv, pretrained_tokenizer

DULL, WARM = "a dull , lifeless film without a reason to exist", "a warm , funny and moving story , a joy to see"


def main(folder: str, tsv: str | None = None, name: str | None = None) -> Trainer:
    if tsv is None:
        tsv = f"{folder}/sentences.tsv"
        with open(tsv, "w") as file:
            file.write("\n".join(["label\tsentence", *[f"0\t{DULL}", f"1\t{WARM}"] * 8]))
    if name is None:  # a small BERT over bytes, nothing to download
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = AutoModelForSequenceClassification.from_config(BertConfig(vocab_size=259, num_labels=2, **sizes))
        data = load_tsv(tsv, length=64)
    else:
        model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=2)
        data = load_tsv(tsv, tokenizer=pretrained_tokenizer(name))
    rows = zip(data.ids, data.mask, data.labels, strict=True)
    examples = [{"input_ids": ids, "attention_mask": mask, "labels": label} for ids, mask, label in rows]
    arguments = TrainingArguments(
        folder, max_steps=4, logging_steps=2, save_steps=4, per_device_train_batch_size=8, report_to="none"
    )
    trainer = Trainer(model, arguments, train_dataset=examples, callbacks=[HadamardCallback()])
    trainer.train()
    return trainer


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(main(folder, *sys.argv[1:]).state.log_history[-1])

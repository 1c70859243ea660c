"""Detect objects by YOLOS and transformers' Trainer. Arguments: an instances.json of COCO, the folder of its images."""

import hotrain.train  # noqa: F401, I001 (first: torchvision may not fit PyTorch)
import json
import sys
import tempfile
from pathlib import Path

from PIL import Image
from transformers import Trainer, TrainingArguments, YolosConfig, YolosForObjectDetection, YolosImageProcessor

from hotrain.integrations.transformers import HadamardCallback


def main(folder: str, *data: str) -> Trainer:
    file, root = data or (f"{folder}/instances.json", folder)
    if not data:  # eight images of noise
        boxes = [{"image_id": i, "category_id": 1 + 2 * (i % 2), "bbox": [8, i, 24, 32], "area": 768} for i in range(8)]
        named = [{"id": i, "file_name": f"{i}.png"} for i in range(8)]
        Path(file).write_text(json.dumps({"images": named, "annotations": boxes, "categories": [{"id": 1}, {"id": 3}]}))
        _ = [Image.effect_noise((64, 48), 50).save(f"{folder}/{i}.png") for i in range(8)]
    coco = json.loads(Path(file).read_text())
    rows = {row["id"]: row | {"image_id": row["id"], "annotations": []} for row in coco["images"]}
    _ = [rows[box["image_id"]]["annotations"].append(box) for box in coco["annotations"]]
    process = YolosImageProcessor(size={"height": 64, "width": 64}, do_pad=False)

    def collate(rows: list[dict]) -> dict:
        return process([Image.open(f"{root}/{r['file_name']}").convert("RGB") for r in rows], rows, return_tensors="pt")

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = YolosConfig(num_labels=1 + max(c["id"] for c in coco["categories"]), image_size=(64, 64), **sizes)
    args = TrainingArguments(folder, max_steps=2, remove_unused_columns=False, report_to="none")
    trainer = Trainer(YolosForObjectDetection(config), args, collate, [*rows.values()], callbacks=[HadamardCallback()])
    trainer.train()
    return trainer


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(__doc__ if "--help" in sys.argv else main(folder, *sys.argv[1:]).state.log_history[-1])

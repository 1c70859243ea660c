"""Several GPUs or CPU processes: torchrun --standalone --nproc_per_node 2 examples/distributed.py fsdp [--compile]."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

import hotrain
from hotrain.train.models import create_model


def main(way: str, *flags: str, folder: str = "runs/distributed") -> tuple[torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(0)  # the same weights on every rank; converted layers draw by rank
    model, exact = (create_model("test_vit", classes=10, channels=3, image_size=64) for _ in range(2))
    hotrain.convert(model)  # before the compiler, and before DDP or fully_shard
    for part in (*model.blocks, model):
        part.compile() if "--compile" in flags and part is not model else None
        fully_shard(part) if way == "fsdp" else None
    wrapped = model if way == "fsdp" else torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(dist.get_rank())  # each rank has images of its own
    for _ in range(2):
        torch.nn.functional.cross_entropy(wrapped(torch.randn(4, 3, 64, 64)), torch.arange(4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)  # each rank writes its shards
    dcp.load({"model": exact.state_dict()}, checkpoint_id=folder)  # into an exact model of one process, in place
    return model, exact


if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group()
    main(*sys.argv[1:])

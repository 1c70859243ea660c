"""Several GPUs or CPU processes: torchrun --standalone --nproc_per_node 2 examples/distributed.py fsdp [--compile]."""

import hotrain  # noqa: I001
from hotrain.train.models import create_model  # first: torchvision may not fit PyTorch
import sys
import torch
from torch.distributed import checkpoint, fsdp, get_node_local_rank, get_rank, init_process_group
from torch.distributed.checkpoint.state_dict import get_model_state_dict


def main(way: str = "", *flags: str, folder: str = "runs/distributed") -> tuple[torch.nn.Module, torch.nn.Module]:
    if way not in ("ddp", "fsdp") or set(flags) - {"--compile"}:
        raise ValueError(f"the arguments are {[way, *flags]}; accepted are ddp or fsdp, and --compile behind it")
    torch.manual_seed(0)  # the same weights on every rank; converted layers draw by rank
    model, exact = (create_model("test_vit", classes=10, channels=3, image_size=160) for _ in range(2))
    hotrain.convert(model)  # before the compiler, and before DDP or fully_shard
    kept, before = (hotrain.saved_bytes(each, torch.randn(4, 3, 160, 160)).total >> 10 for each in (model, exact))
    for block in model.blocks:
        block.compile() if "--compile" in flags else None
        fsdp.fully_shard(block) if way == "fsdp" else None
    wrapped = fsdp.fully_shard(model) if way == "fsdp" else torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(get_rank())  # each rank has images of its own
    for _ in range(2):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(wrapped(torch.randn(4, 3, 160, 160)), torch.arange(4))
        loss.backward()
        optimizer.step()
    print(f"loss {loss:.2f}; {kept} KiB kept for backward, exact {before}") if get_rank() == 0 else None
    checkpoint.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)  # each rank writes its shards
    checkpoint.load({"model": exact.state_dict()}, checkpoint_id=folder)  # into an exact model, in place
    return model, exact


if __name__ == "__main__":
    sys.exit(print(__doc__)) if "--help" in sys.argv else init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(get_node_local_rank())
        torch.set_default_device("cuda")
    main(*sys.argv[1:])

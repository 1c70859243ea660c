"""The trainer on a CUDA device: bit-exact resume under deterministic algorithms, and measured memory."""

import re
from collections.abc import Callable

import pytest
import torch

from hotrain import draws
from hotrain.train import Diverged, TrainRun, silent, train
from hotrain.train.distributed import Processes
from hotrain.train.setup import build
from hotrain.train.training import WATCH, Training

Make = Callable[..., TrainRun]


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["exact", "hot-unbiased"])
@pytest.mark.parametrize("amp", ["bf16", "fp16", None])
def test_a_resumed_run_is_the_uninterrupted_one(tiny: Make, method: str, amp: str | None) -> None:
    run = tiny(method=method, amp=amp, device="cuda", deterministic=True, mixup=0.5, ema=0.9)
    whole = train(run, on_progress=silent)
    part = train(run, stop_after=3, on_progress=silent)
    resumed = train(run, resume=part.checkpoint_path, on_progress=silent)
    assert whole.model is not None
    assert resumed.model is not None
    got = resumed.model.state_dict()
    assert [k for k, v in whole.model.state_dict().items() if not torch.equal(v, got[k])] == []
    assert whole.peak_bytes is not None
    assert whole.peak_bytes > 0
    assert not torch.are_deterministic_algorithms_enabled()  # left as found


@pytest.mark.gpu
@pytest.mark.filterwarnings(
    "ignore:hotrain. no kernel"
)  # for convolutions of 3×3; their definition must not wait either
@pytest.mark.parametrize("method", ["exact", "hot-unbiased"])
def test_an_update_does_not_wait_for_the_device(tiny: Make, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that share a GPU take turns: one that waits within an update waits for the turns of all the others."""
    monkeypatch.setattr(draws._seed, "graphs", False)  # as in a process that has compiled nothing
    run = tiny(model="demo_resnet", model_args={}, method=method, amp="bf16", device="cuda", crop_padding=1, flip=True)
    ranks = Processes(device=torch.device("cuda"))
    training = Training(build(run, ranks), ranks)
    training.start_epoch(0)
    batches = training.setup.feed.updates(0)
    for _ in range(2):  # tables are made, and kernels compiled
        training.step(next(batches))
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        training.step(next(batches))
        for training.update in (WATCH, 2 * WATCH):  # the first look has nothing before it
            training.watch()
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("amp", "lr", "within"), [(None, 1e20, 2 * WATCH), ("bf16", 1e20, 2 * WATCH), ("fp16", 1e30, 80)]
)
def test_divergence_is_found_within_some_updates(tiny: Make, amp: str | None, lr: float, within: int) -> None:
    """The loss is looked at every WATCH updates, as it was WATCH before; fp16's scale falls for 30 updates first."""
    run = tiny(
        method="exact", optimizer="momentum", lr=lr, batch_size=1, amp=amp, device="cuda"
    )  # 160 updates an epoch
    with pytest.raises(Diverged) as caught:
        train(run, on_progress=silent)
    update = re.search(r"by update (\d+) of 320", str(caught.value))
    assert update is not None
    assert int(update[1]) <= within

"""The trainer on a CUDA device: bit-exact resume under deterministic algorithms, and measured memory."""

from collections.abc import Callable

import pytest
import torch

from hotrain.train import TrainRun, silent, train

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

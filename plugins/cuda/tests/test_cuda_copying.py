"""core_cuda/copying.py: weights arrive whole, in order, whatever their layout, and before work that is queued later."""

from __future__ import annotations

import pytest
import torch

from core_cuda import copying

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of torch")


@pytest.mark.parametrize("length", [0, 1, 5, 16, 17, 40])
def test_pieces_cover_a_tensor_once(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_PIECE", 16)
    source, target = torch.arange(length, dtype=torch.int16), torch.zeros(length, dtype=torch.int16)
    cut = copying.pieces(source, target)
    assert [address - source.data_ptr() for address, _ in cut] == list(range(0, 2 * length, 16))
    for _, part in cut:
        part += 1
    assert sum(part.numel() for _, part in cut) == 2 * length
    assert bool((target == 257).all()), "each byte once"


def weights() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [
        torch.randn(513, 1027, generator=draw),
        torch.randn(64, 3, generator=draw).t(),
        torch.empty(0),
        torch.randn(300_001, generator=draw).bfloat16(),
        torch.randint(0, 255, (1_000_001,), dtype=torch.uint8, generator=draw),
        torch.tensor(3.5),
    ]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("fewest", [0, 2**40])
def test_copies_are_equal_beside_work_that_runs(fewest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_PIECE", 2**16)
    monkeypatch.setattr(copying, "_FEWEST_BYTES", fewest)
    device = torch.device("cuda", torch.cuda.current_device())
    given = [*weights(), torch.ones(3, device=device)] * 4
    for _ in range(3):
        busy = [torch.randn(2048, 2048, device=device) for _ in range(4)]
        busy = [each @ each for each in busy]
        del busy  # queued work may still use memory that the copies get
        copied = copying.copy_in(device, given)
        for source, there in zip(given, copied, strict=True):
            assert there.device == device and there.stride() == source.stride() and there.dtype == source.dtype
            assert torch.equal(there.cpu(), source.cpu())


@pytest.mark.gpu
@needs_gpu
def test_copies_made_in_inference_mode_can_be_trained_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_FEWEST_BYTES", 0)
    with torch.inference_mode():
        (copied,) = copying.copy_in(torch.device("cuda"), [torch.ones(4)])
    assert not copied.is_inference()

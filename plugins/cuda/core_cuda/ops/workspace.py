"""Memory that kernels keep between launches: constants, and counters by which a program knows that it is the last."""

from __future__ import annotations

import torch
from torch import Tensor

from core.errors import CaptureError

_AT_LEAST = 16_384  # counters: 64 KiB, so that a buffer hardly ever has to grow
_BUFFERS: dict[tuple[torch.device, int], list[Tensor]] = {}
"""By device and stream, the largest last: captured graphs hold the address of the smaller ones too."""
_ONES: dict[torch.device, Tensor] = {}


def counters(n: int, device: torch.device) -> Tensor:
    """Return at least n int32 counters on the device, all zero; the kernel that uses them must reset them to zero.

    Kernels of one stream run one after the other and share them; another stream has its own. Counters are never freed,
    so graphs may hold their address. Raises `CaptureError` where they have to be made while the stream is captured.
    """
    on_gpu = device.type == "cuda"
    stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else 0
    buffers = _BUFFERS.setdefault((device, stream), [])
    if not buffers or len(buffers[-1]) < n:
        if on_gpu and torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                f"{n} counters of a kernel on {device}",
                found=f"{len(buffers[-1]) if buffers else 0} on this stream, which is being captured",
                remedy="run the same call once on this stream before the capture",
            )
        buffers.append(torch.zeros(max(n, _AT_LEAST), dtype=torch.int32, device=device))
    return buffers[-1]


def one(device: torch.device) -> Tensor:
    """Return the number 1 on the device, fp32 of shape (); nobody may write to it, and it is never freed.

    Raises `CaptureError` where it has to be made while the stream is captured.
    """
    if device not in _ONES:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                f"a constant of a kernel on {device}",
                found="its stream is being captured, and the constant does not exist yet",
                remedy="run the same call once before the capture",
            )
        _ONES[device] = torch.ones((), device=device)
    return _ONES[device]

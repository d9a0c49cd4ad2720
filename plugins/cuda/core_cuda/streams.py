"""The streams that go with others, and cuBLAS's workspace on each."""

from __future__ import annotations

import torch

from core.errors import CaptureError

_BESIDE: dict[tuple[torch.device, int], torch.cuda.Stream] = {}
"""By GPU and stream, the stream for what runs beside it: always the same, since kernels keep counters by stream."""

_NUM_STREAMS = 32
"""As many streams torch has on a GPU, besides the default one."""

_WORKSPACES: dict[tuple[torch.device, int], torch.cuda.MemPool] = {}
"""By GPU and stream: the memory of cuBLAS's workspace for that stream, never given back; see `_keep_workspace`."""


def beside(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that goes with the current one.

    Raises `CaptureError` where it has to be made while the current stream is captured.
    """
    main = torch.cuda.current_stream(device)
    key = (main.device, main.cuda_stream)
    if key not in _BESIDE:
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                f"a second stream on {main.device}",
                found="the current one is being captured, and none was made for it",
                remedy="run the same call once on this stream before the capture",
            )
        _BESIDE[key] = other = _unused(main)
        with torch.cuda.stream(other):
            _keep_workspace(other)
    return _BESIDE[key]


def _unused(main: torch.cuda.Stream) -> torch.cuda.Stream:
    """Return a stream that neither is this one nor goes with another: torch hands out the same 32 again and again."""
    taken = {main.cuda_stream, *(number for _, number in _BESIDE), *(each.cuda_stream for each in _BESIDE.values())}
    others = (torch.cuda.Stream(main.device) for _ in range(_NUM_STREAMS))
    other = next((each for each in others if each.cuda_stream not in taken), None)
    if other is None:
        raise CaptureError(
            f"a second stream on {main.device}",
            found=f"all {_NUM_STREAMS} streams that torch has are taken by programs",
            remedy="close programs, or leave out the pass that runs work on a second stream",
        )
    return other


def keep_workspaces(stream: torch.cuda.Stream) -> None:
    """Have cuBLAS's workspaces for the current stream, and for the one beside it, lie where nothing else is put."""
    _keep_workspace(stream)
    other = _BESIDE.get((stream.device, stream.cuda_stream))
    if other is not None:
        with torch.cuda.stream(other):
            _keep_workspace(other)


def _keep_workspace(stream: torch.cuda.Stream) -> None:
    """Have cuBLAS's workspace for the current stream lie in memory that stays mapped and is used for nothing else.

    torch holds one for each stream on which it multiplied, and a captured product holds its address. Whoever calls
    `torch._C._cuda_clearCublasWorkspaces` gives them all back, as `torch.compile(mode="reduce-overhead")` does each
    time it records: graphs captured before would go on to write into memory that is others' by then.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return  # the only one with pools that a program can hold
    pool = _WORKSPACES.get((stream.device, stream.cuda_stream))
    if pool is None:
        pool = _WORKSPACES[stream.device, stream.cuda_stream] = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool, stream.device):
        # Where it was cleared, this allocates it again: at its old place, since nothing else lies in this pool.
        small = torch.zeros(16, 16, device=stream.device)
        torch.mm(small, small)

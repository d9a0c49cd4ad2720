"""Plans of FlashInfer's prefill attention over pages, one for the bounds of a bucket, and their runs with open lengths.

What a plan leaves in its memory is FlashInfer's own affair, and no contract. The places are those of 0.6.12; each plan
is compared with what it must hold for the lengths that it was made for, and one that differs is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from core.errors import CaptureError
from core_cuda.flashinfer import presence
from core_cuda.ops import launching
from core_cuda.ops.attention.schedule import chunks_kernel, tiles_kernel, works_kernel

_INT_BYTES = 2**22
"""Of a plan's own memory: a tile or a work takes 28 bytes at most, and steps have at most some tens of thousands."""
_FLOAT_BYTES = 2**26
"""Of the memory for partial results, which plans of a stream share."""
_LEAST_CHUNK = 128
"""Positions that are worth a part of their own."""
_INT = 4  # bytes
_FA3_TILES = {64: 192, 128: 128, 256: 128}
"""Rows of a tile of FlashAttention 3 by head size."""
_FA2_PLAN = (
    *("num_tiles", "num_rows", "total_rows", "tile", "requests", "tiles", "chunks", "merged_rows", "first_rows"),
    *("chunk_size", "values", "sums", "valid", "for_graphs", "split"),
)
_FA3_PLAN = (
    *("tiles", "first_tokens", "first_pages", "new_tokens", "lengths", "heads", "work_indptr", "sequences"),
    "same_for_all_heads",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What a plan is made for: the sizes of a bucket and the form of an attention."""

    backend: str
    tokens: int
    sequences: int
    #: blocks of a sequence, at most
    width: int
    page: int
    heads: int
    kv_heads: int
    size: int
    dtype: torch.dtype
    scale: float
    window: int
    softcap: float
    causal: bool
    #: whether each sequence has one new token at most
    single: bool


class Planned:
    """A plan for the bounds of a bucket. Its memory is never freed: graphs hold its address."""

    def __init__(self, bounds: Bounds, floats: Tensor) -> None:
        """Plan; floats: memory for partial results."""
        self.bounds, device = bounds, floats.device
        self.chunks = 0
        self._ints = torch.zeros(_INT_BYTES // _INT, dtype=torch.int32, device=device)
        self._floats = floats
        if bounds.backend == "fa3":
            self._plan([0] + [bounds.tokens] * bounds.sequences)
            self._check_works()
            return
        # One sequence more, for programs that have nothing to do.
        self._plan([0] + [bounds.tokens] * bounds.sequences + [bounds.tokens], disable_split_kv=True)
        chunks, seen = self._chunks()
        if chunks > 1:
            pages = -(-seen // chunks)
            self.chunks = -(-seen // pages)
            self._plan(list(range(bounds.sequences + 1)), fixed_split_size=pages)
        self._check_tiles()

    def run(
        self, query: Tensor, caches: tuple[Tensor, Tensor], seq_lens: Tensor, query_starts: Tensor, table: Tensor
    ) -> Tensor:
        """Return the attention (T, H, D) of query (T, H, D) over caches (N, P, K, D); rows of padding are zero."""
        table = table if table.stride(1) == 1 else table.contiguous()
        read = (seq_lens.contiguous(), query_starts.contiguous(), table, table.stride(0))
        shared = (*read, self._qo_indptr, self._last_page, self._indices)
        if self.bounds.backend == "fa3":
            self._deal_works(shared)
        elif self.chunks:
            self._cut_chunks(shared)
        else:
            self._lay_tiles(shared)
        out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        # Not overlapped with the kernel before: FlashInfer's reads the schedule before it waits.
        self._wrapper.run(query, caches, out=out, enable_pdl=False)
        return out

    def _plan(self, starts: list[int], **how: Any) -> None:
        """Plan for sequences that begin at these tokens and fill their rows of the block table; a last one beyond the
        bounds has no pages."""
        bounds, device = self.bounds, self._ints.device
        num_seqs = len(starts) - 1
        pages = [min(i, bounds.sequences) * bounds.width for i in range(num_seqs + 1)]
        last = [bounds.page if i < bounds.sequences else 0 for i in range(num_seqs)]

        def index(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self._qo_indptr, self._last_page = index(num_seqs + 1), index(num_seqs)
        self._indices = index(bounds.sequences * bounds.width)
        kv_indptr = index(num_seqs + 1)
        self._wrapper = presence.load().BatchPrefillWithPagedKVCacheWrapper(
            self._floats,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=self._qo_indptr,
            paged_kv_indptr_buf=kv_indptr,
            paged_kv_indices_buf=self._indices,
            paged_kv_last_page_len_buf=self._last_page,
            backend=bounds.backend,
        )
        self._wrapper.reset_workspace_buffer(self._floats, self._ints.view(torch.uint8))
        self._wrapper.plan(
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(pages, dtype=torch.int32),
            torch.zeros(bounds.sequences * bounds.width, dtype=torch.int32, device=device),
            torch.tensor(last, dtype=torch.int32),
            bounds.heads,
            bounds.kv_heads,
            bounds.size,
            bounds.page,
            causal=bounds.causal,
            sm_scale=bounds.scale,
            window_left=bounds.window - 1 if bounds.window else -1,
            logits_soft_cap=bounds.softcap,
            q_data_type=bounds.dtype,
            kv_data_type=bounds.dtype,
            **how,
        )
        names = _FA3_PLAN if bounds.backend == "fa3" else _FA2_PLAN
        found = [int(each) for each in self._wrapper._plan_info]
        if len(found) != len(names):
            raise _unknown(f"it has {len(found)} numbers, where {len(names)} are known")
        self._layout = dict(zip(names, found, strict=True))

    def _at(self, name: str) -> Tensor:
        """Return the plan's memory from where it keeps something on."""
        return self._ints[self._layout[name] // _INT :]

    def _chunks(self) -> tuple[int, int]:
        """Return into how many parts the positions of a sequence may be cut, and how many of its pages are seen.

        It is cut where programs would be idle else, and each has one tile of rows.
        """
        bounds, layout = self.bounds, self._layout
        programs = layout["num_tiles"] - 1  # about as many as the GPU runs at a time; one is of the idle sequence
        parts = bounds.heads * programs * layout["tile"] * (bounds.size + 1) * 4
        fits = parts <= _FLOAT_BYTES and bounds.heads // bounds.kv_heads <= layout["tile"]
        seen = bounds.width
        if bounds.window:
            seen = min(seen, -(-(bounds.window - 1 + layout["tile"]) // bounds.page))
        cut = fits and bounds.single and bounds.tokens == bounds.sequences
        return (programs // bounds.sequences if cut else 0), seen

    def _check_tiles(self) -> None:
        """Compare the plan of FlashAttention 2 with what it was made for."""
        bounds, layout, group = self.bounds, self._layout, self.bounds.heads // self.bounds.kv_heads
        if bool(layout["split"]) != bool(self.chunks) or not layout["for_graphs"]:
            raise _unknown("it is not cut into parts as it was asked for")
        if self.chunks:
            rows = [i * self.chunks for i in range(bounds.sequences + 1)]
            owners = [i // self.chunks for i in range(bounds.sequences * self.chunks)]
            self._expect("merged_rows", rows)
        else:
            rows = [0] + [bounds.tokens] * (bounds.sequences + 1)
            owners = [0] * -(-bounds.tokens * group // layout["tile"])
        self._expect("first_rows", rows)
        self._expect("requests", owners)
        self._expect("total_rows", [bounds.tokens])

    def _check_works(self) -> None:
        """Compare the plan of FlashAttention 3 with what it was made for."""
        bounds, programs = self.bounds, launching.num_multiprocessors()
        if self._layout["same_for_all_heads"]:
            raise _unknown("it has one schedule for all heads")
        works = -(-bounds.tokens // _FA3_TILES[bounds.size]) * bounds.heads
        if int(self._at("work_indptr")[programs]) != works:
            raise _unknown(f"it does not hold {works} works of {programs} programs")
        self._expect("new_tokens", [bounds.tokens] * works)
        self._expect("lengths", [bounds.width * bounds.page] * works)

    def _expect(self, name: str, wanted: Sequence[int]) -> None:
        if self._at(name)[: len(wanted)].tolist() != list(wanted):
            raise _unknown(f"{name} is not what it was made for")

    def _capacity(self) -> int:
        return (self.bounds.width - 1) * self.bounds.page

    def _lay_tiles(self, shared: tuple[Any, ...]) -> None:
        bounds, layout = self.bounds, self._layout
        block_b = triton.next_power_of_2(bounds.sequences + 2)
        block_t = _block(block_b)
        launching.launch(
            tiles_kernel,
            (triton.cdiv(layout["num_tiles"], block_t),),
            *shared,
            *map(self._at, ("requests", "tiles", "chunks", "first_rows", "total_rows")),
            *(bounds.sequences, layout["num_tiles"], bounds.width, self._capacity()),
            GROUP=bounds.heads // bounds.kv_heads,
            TILE=layout["tile"],
            BLOCK_B=block_b,
            BLOCK_T=block_t,
        )

    def _cut_chunks(self, shared: tuple[Any, ...]) -> None:
        bounds = self.bounds
        launching.launch(
            chunks_kernel,
            (max(1, min(64, bounds.sequences * bounds.width // 256)),),
            *shared,
            *map(self._at, ("first_rows", "total_rows", "chunk_size")),
            *(bounds.sequences, bounds.width, self._capacity()),
            CHUNKS=self.chunks,
            WINDOW=bounds.window,
            LEAST=_LEAST_CHUNK,
            BLOCK_B=triton.next_power_of_2(bounds.sequences + 1),
        )

    def _deal_works(self, shared: tuple[Any, ...]) -> None:
        bounds, programs = self.bounds, launching.num_multiprocessors()
        tile = _FA3_TILES[bounds.size]
        most = (-(-bounds.tokens // tile) + bounds.sequences - 1) * bounds.heads
        block_b = triton.next_power_of_2(bounds.sequences + 1)
        block_t = _block(block_b)
        launching.launch(
            works_kernel,
            (triton.cdiv(most, block_t),),
            *shared,
            *map(self._at, _FA3_PLAN[:-1]),
            *(bounds.sequences, most, programs, bounds.width, self._capacity()),
            HEADS=bounds.heads,
            TILE=tile,
            BLOCK_B=block_b,
            BLOCK_P=triton.next_power_of_2(programs + 1),
            BLOCK_T=block_t,
        )


_PLANNED: dict[tuple[torch.device, int, Bounds], Planned] = {}
_FLOATS: dict[tuple[torch.device, int], Tensor] = {}


def planned(bounds: Bounds, device: torch.device) -> Planned:
    """Return the plan for these bounds on the current stream, made at the first call.

    Raises `CaptureError` where it has to be made while the stream is captured, and `RuntimeError` where FlashInfer's
    plan is none that is known here.
    """
    on_gpu = device.type == "cuda"
    stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else 0
    found = _PLANNED.get((device, stream, bounds))
    if found is None:
        if on_gpu and torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                f"a plan of FlashInfer's attention on {device}",
                found="its stream is being captured, and nothing is planned for these sizes yet",
                remedy="run the same call once on this stream before the capture",
            )
        if (device, stream) not in _FLOATS:
            _FLOATS[device, stream] = torch.empty(_FLOAT_BYTES, dtype=torch.uint8, device=device)
        found = _PLANNED[device, stream, bounds] = Planned(bounds, _FLOATS[device, stream])
    return found


def _block(block_b: int) -> int:
    """Return how many tiles a program of the schedule takes, so that a tile by sequence stays small."""
    return max(16, min(128, 8192 // block_b))


def _unknown(why: str) -> RuntimeError:
    return RuntimeError(
        f"the plan of FlashInfer {presence.installed()} is laid out otherwise than that of 0.6.12: {why}"
    )

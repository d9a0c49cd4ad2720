"""The stand-in's attention over pages: its plans, as memory that its runs read, and both of its algorithms.

It knows only what FlashInfer 0.6.12 has in common with `planning.py`: where a plan keeps what.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

PROGRAMS = 8
"""Multiprocessors, as `launching` has it where kernels are interpreted."""
FA3_TILES = {64: 192, 128: 128, 256: 128}


class Wrapper:
    """`BatchPrefillWithPagedKVCacheWrapper` for captured graphs."""

    def __init__(self, floats: Tensor, layout: str, **given: Any) -> None:
        assert layout == "NHD" and floats.dtype == torch.uint8
        assert given.pop("use_cuda_graph") is True
        self._backend = given.pop("backend")
        names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
        self._starts, self._page_starts, self._indices, self._last = (given.pop(name) for name in names)
        assert not given and self._backend in ("fa2", "fa3")
        assert all(each.dtype == torch.int32 for each in (self._starts, self._page_starts, self._indices, self._last))
        self._plan_info: list[int] = []

    def reset_workspace_buffer(self, floats: Tensor, ints: Tensor) -> None:
        assert floats.dtype == ints.dtype == torch.uint8
        self._floats, self._ints = floats, ints.view(torch.int32)

    def plan(self, starts: Tensor, pages: Tensor, indices: Tensor, last: Tensor, heads: int, kv_heads: int, size: int,
             page: int, **how: Any) -> None:  # fmt: skip
        options = {
            "causal": False, "sm_scale": None, "window_left": -1, "logits_soft_cap": None, "q_data_type": None,
            "kv_data_type": None, "fixed_split_size": None, "disable_split_kv": False,
        }  # fmt: skip
        assert set(how) <= set(options) and starts.device.type == pages.device.type == "cpu"
        self.how = options | how
        assert len(starts) == len(self._starts) == len(last) + 1 == len(pages) and len(indices) <= len(self._indices)
        assert heads % kv_heads == 0 and size in FA3_TILES and how["q_data_type"] == how["kv_data_type"]
        self._sizes = (heads, kv_heads, size, page)
        self._starts.copy_(starts)
        self._page_starts.copy_(pages)
        self._last.copy_(last)
        self._indices[: len(indices)].copy_(indices)
        self._used = 0
        lengths = ((pages.diff() - 1).clamp(min=0) * page + last).tolist()
        if self._backend == "fa2":
            self._plan_info = self._plan_fa2(starts.tolist(), pages.diff().tolist())
        else:
            assert self.how["fixed_split_size"] is None and not self.how["disable_split_kv"]
            self._plan_info = self._plan_fa3(starts.tolist(), pages.tolist(), lengths)
        self._num_rows = int(starts[-1])

    def _place(self, size: int, values: list[int]) -> int:
        """Lay values down in memory for `size` of them, garbage behind; return the offset in bytes."""
        at = -(-self._used // 4) * 4
        self._ints[at : at + size] = 123456789
        self._ints[at : at + len(values)] = torch.tensor(values, dtype=torch.int32)
        self._used = at + size
        return at * 4

    def _plan_fa2(self, starts: list[int], pages: list[int]) -> list[int]:
        heads, kv_heads, size, page = self._sizes
        group, batch, rows = heads // kv_heads, len(pages), starts[-1]
        most = (rows - batch + 1) % 2**32 * group
        tile = 128 if most > 64 and size < 256 else 64 if most > 16 else 16
        window = self.how["window_left"]
        seen = [min(-(-(window + tile) // page), each) if window >= 0 else each for each in pages]
        assert self.how["disable_split_kv"] or self.how["fixed_split_size"]  # the search for a size is not here
        chunk = self.how["fixed_split_size"] or 2**31
        requests, tiles, chunks, merged, first = [], [], [], [0], [0]
        for i, (begin, end) in enumerate(pairwise(starts)):
            parts = 1 if self.how["disable_split_kv"] else -(-max(seen[i], 1) // chunk)
            for number in range(-(-(end - begin) * group // tile)):
                requests += [i] * parts
                tiles += [number] * parts
                chunks += range(parts)
            merged += [merged[-1] + parts * (row + 1) for row in range(end - begin)]
            first.append(first[-1] + (end - begin) * parts)
        split = max(chunks, default=0) > 0
        padded = max(2 * PROGRAMS // kv_heads, -(-rows * group // tile) + batch - 1)
        assert len(requests) <= padded, "new batch size should not exceed padded batch size"
        at = {name: self._place(padded, each) for name, each in zip("rtc", (requests, tiles, chunks), strict=True)}
        at["first"] = self._place(batch + 1, first)
        at["chunk"] = self._place(1, [min(chunk * page, 2**31 - 1)])
        at["total"] = self._place(1, [rows])
        at["merged"] = self._place(rows + 1, merged) if split else 0
        at["valid"] = self._place(padded, [int(i < len(requests)) for i in range(padded)]) if split else 0
        if split:
            assert heads * padded * tile * (size + 1) * 4 <= self._floats.numel()
        order = (padded, rows, at["total"], tile, at["r"], at["t"], at["c"], at["merged"], at["first"], at["chunk"])
        return [*order, 0, 0, at["valid"], 1, int(split)]

    def _plan_fa3(self, starts: list[int], pages: list[int], lengths: list[int]) -> list[int]:
        heads, _, size, _ = self._sizes
        tile, works = FA3_TILES[size], []
        for head in range(heads):
            for i, (begin, end) in enumerate(pairwise(starts)):
                for number in reversed(range(-(-(end - begin) // tile))):
                    works.append((number, begin, pages[i], end - begin, lengths[i], head, i))
        dealt = [works[program::PROGRAMS] for program in range(PROGRAMS)]
        ends = [0]
        for each in dealt:
            ends.append(ends[-1] + len(each))
        columns = list(zip(*[work for each in dealt for work in each], strict=True)) or [()] * 7
        most = (-(-starts[-1] // tile) + len(lengths) - 1) * heads
        places = [self._place(most, list(column)) for column in columns]
        return [*places[:6], self._place(PROGRAMS + 1, ends), places[6], 0]

    def run(self, query: Tensor, caches: tuple[Tensor, Tensor], *, out: Tensor, enable_pdl: bool) -> Tensor:
        keys, values = caches
        heads, kv_heads, size, page = self._sizes
        assert enable_pdl is False  # the kernels read their schedule before they wait
        assert query.shape == (self._num_rows, heads, size) and query.stride(2) == 1 and out.is_contiguous()
        assert query.dtype == keys.dtype == out.dtype == self.how["q_data_type"]
        assert keys.stride() == values.stride() and keys.shape[1:] == (page, kv_heads, size)
        (self._run_fa2 if self._backend == "fa2" else self._run_fa3)(query, keys, values, out)
        return out

    def _history(self, cache: Tensor, first_page: int, length: int) -> Tensor:
        """Return the positions (S, K, D) of a sequence; those beyond its end are not there."""
        page = self._sizes[3]
        blocks = self._indices[first_page : first_page + -(-length // page)].long()
        return cache[blocks].flatten(0, 1)[:length].float()

    def _rows(
        self, query: Tensor, keys: Tensor, values: Tensor, begin: int, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return results (R, D) of rows at positions (R,) over keys (S, D) from `begin` on, and their sums' log2."""
        scores = query.float() @ keys.t() * self.how["sm_scale"]
        if self.how["logits_soft_cap"]:
            scores = self.how["logits_soft_cap"] * torch.tanh(scores / self.how["logits_soft_cap"])
        at = begin + torch.arange(len(keys))
        hidden = torch.zeros(scores.shape, dtype=torch.bool)
        if self.how["causal"]:
            hidden |= at > positions[:, None]
        if self.how["window_left"] >= 0:
            hidden |= at < positions[:, None] - self.how["window_left"]
        scores = scores.masked_fill(hidden, -torch.inf)
        sums = torch.logsumexp(scores, 1) if len(keys) else torch.full((len(query),), -torch.inf)
        weights = torch.exp(scores - sums[:, None]).nan_to_num(0.0)
        return weights @ values, sums

    def _run_fa2(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        heads, kv_heads, _, page = self._sizes
        group, info = heads // kv_heads, self._plan_info
        memory = {
            name: self._ints[info[i] // 4 :] for name, i in zip("trqcmfsv", (2, 4, 5, 6, 7, 8, 9, 12), strict=True)
        }
        tile, split = info[3], bool(info[14])
        parts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        for program in range(info[0]):
            if split and not memory["v"][program]:
                continue
            i, number, part = (int(memory[name][program]) for name in "rqc")
            begin, pages = int(self._starts[i]), int(self._page_starts[i])
            new, own = int(self._starts[i + 1]) - begin, int(self._page_starts[i + 1]) - pages
            length = (own - 1) * page + int(self._last[i]) if own else 0
            assert length >= 0
            window = self.how["window_left"] if self.how["window_left"] >= 0 else length
            left = max(0, length + number * tile // group - new - window)
            chunk = int(memory["s"][0]) if split else length - left
            low, high = min(part * chunk + left, length), min((part + 1) * chunk + left, length)
            stride = -(-min(max(length, 1), window + tile) // chunk) if split else 1
            seen = [self._history(each, pages, length)[low:high] for each in (keys, values)]
            for packed in range(number * tile, min((number + 1) * tile, new * group)):
                token, inner = divmod(packed, group)
                row = int(memory["f"][i]) + token * stride + (part if split else 0)
                for kv in range(kv_heads):
                    head = kv * group + inner
                    position = torch.tensor([length - new + token])
                    result = self._rows(query[begin + token, head][None], seen[0][:, kv], seen[1][:, kv], low, position)
                    if split:
                        parts[row, head] = (result[0][0], result[1][0])
                    else:
                        out[row, head] = result[0][0]
        for row in range(int(memory["t"][0]) if split else 0):
            for head in range(heads):
                found = [parts[at, head] for at in range(int(memory["m"][row]), int(memory["m"][row + 1]))]
                weights = torch.softmax(torch.stack([each[1] for each in found]), 0)
                out[row, head] = weights @ torch.stack([each[0] for each in found])

    def _run_fa3(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        heads, kv_heads, size, _ = self._sizes
        tile, group = FA3_TILES[size], heads // kv_heads
        tiles, first, pages, new, lengths, of_head, ends, _ = (self._ints[each // 4 :] for each in self._plan_info[:8])
        for program in range(PROGRAMS):
            for work in range(int(ends[program]), int(ends[program + 1])):
                number, begin, count, length = (int(each[work]) for each in (tiles, first, new, lengths))
                head, rows = int(of_head[work]), range(number * tile, min((number + 1) * tile, count))
                if not rows:
                    continue
                seen = [self._history(each, int(pages[work]), length)[:, head // group] for each in (keys, values)]
                positions = torch.tensor([length - count + row for row in rows])
                mine = slice(begin + rows.start, begin + rows.stop)
                out[mine, head] = self._rows(query[mine, head], *seen, 0, positions)[0].to(out.dtype)

"""vLLM as it serves: its engine in a process of its own, asked for what `LLM.generate` asks for.

That engine does not wait to be asked for a step. So a round is a set of requests, which go on from the tokens so far:
the prefix cache has them, and the clock runs from the first token of all sequences on, for the steps asked for.

Where the folder holds no weights, vLLM's parameters are drawn here from the distributions of `core bench`, because
vLLM's own dummies let a router choose the same few experts for every token.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from functools import partial

import torch
from torch import nn

from core.common.peers import PeerRunner, PeerWork
from core_cuda.peers.room import FILL_TOKENS, bytes_per_token, cache_bytes, fitting, longest

_ENVIRONMENT = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # a function that draws weights goes to the process of its engine
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_WARM_UPS = 3
_held: dict[str, _Served] = {}


def engine(work: PeerWork) -> PeerRunner:
    """Compute the prompts of a cell and take its first steps, by the LLM that an earlier cell has left or a new one.

    Raises `RuntimeError` with the words "out of memory" where the device has no room for the cell's cache.
    """
    size = (len(work.prompts), work.limit)
    if "served" not in _held:
        _held["served"] = _Served(work, _room(work, size))
    served = _held["served"]
    if size not in served.sizes:
        raise RuntimeError(f"out of memory: the running engine has a cache for {served.sizes}, not for {size}")
    return served.prefill(work) if work.phase == "prefill" else served.decode(work)


def _room(work: PeerWork, wanted: tuple[int, int]) -> list[tuple[int, int]]:
    config = json.loads((work.folder / "config.json").read_text(encoding="utf-8"))
    free = free_bytes()
    weights = _weight_bytes(work)
    sizes = {(int(seqs), int(limit)) for seqs, limit in work.sizes} | {wanted}
    found = fitting(sorted(sizes), bytes_per_token(config, 2), weights, free)
    if wanted not in found:
        needed = cache_bytes(bytes_per_token(config, 2), *wanted)
        gib = [f"{each / 2**30:.1f}" for each in (weights, needed, free)]
        raise RuntimeError(
            f"out of memory: {gib[0]} GiB of weights and {gib[1]} GiB of cache, and {gib[2]} GiB are free"
        )
    return found


def free_bytes() -> int:
    """Return the bytes that are free on the GPU, without taking any: a CUDA context here would slow vLLM's start."""
    from vllm.third_party import pynvml

    pynvml.nvmlInit()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    by_name = not visible.isdecimal()
    handle = pynvml.nvmlDeviceGetHandleByUUID(visible) if by_name else pynvml.nvmlDeviceGetHandleByIndex(int(visible))
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)


def _weight_bytes(work: PeerWork) -> int:
    """Return the bytes of the weights, by files where there are any, else by building the model on no device."""
    if files := list(work.folder.glob("*.safetensors")):
        return sum(file.stat().st_size for file in files)
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(work.folder))
    return 2 * int(sum(parameter.numel() for parameter in model.parameters()))


class _Served:
    """An LLM with room for all of `sizes`; it serves cell after cell."""

    def __init__(self, work: PeerWork, sizes: list[tuple[int, int]]) -> None:
        os.environ.update(_ENVIRONMENT)
        from vllm import LLM

        self.sizes = sizes
        config = json.loads((work.folder / "config.json").read_text(encoding="utf-8"))
        drawn = not list(work.folder.glob("*.safetensors"))
        batches = sorted({seqs for seqs, _ in sizes})
        # As `core` has: graphs of exactly the sizes measured. Prompts keep vLLM's own choice.
        graphs = {"compilation_config": {"cudagraph_capture_sizes": batches}} if work.phase == "decode" else {}
        self._llm = LLM(
            model=str(work.folder),
            dtype=work.dtype,
            load_format="dummy" if drawn else "auto",
            skip_tokenizer_init=True,
            generation_config="vllm",
            enable_prefix_caching=work.phase == "decode",  # a prompt of prefill is computed anew
            max_model_len=max(longest(*each) for each in sizes),
            max_num_seqs=batches[-1],
            max_num_batched_tokens=max(FILL_TOKENS, *(limit for _, limit in sizes)),
            gpu_memory_utilization=0.05,  # not obeyed where the bytes of the cache are named, but checked
            kv_cache_memory_bytes=max(cache_bytes(bytes_per_token(config, 2), *each) for each in sizes),
            **graphs,
        )
        if drawn:
            hidden = int((config.get("text_config") or config)["hidden_size"])
            self._llm.apply_model(partial(draw, std=hidden**-0.5))
        self._engine = self._llm.llm_engine
        self._names = map(str, itertools.count())
        self._rows: dict[str, int] = {}
        self._elapsed = 0.0

    def decode(self, work: PeerWork) -> PeerRunner:
        """Compute the prompts; a round goes on from the tokens of the round before."""
        tokens: list[list[int]] = [[] for _ in work.prompts]

        def take(first: int, count: int) -> list[list[int]]:
            """Start the clock when every sequence has `first` new tokens; return all new ones."""
            # The last token is computed once more, by which the engine has something to compute.
            rows = [prompt + row[:-1] for prompt, row in zip(work.prompts, tokens, strict=True)]
            self._add(rows, longest(len(rows), work.limit) - max(map(len, rows)))
            found: list[list[int]] = [[] for _ in rows]
            while min(map(len, found)) < first:
                self._take(found)
            start, taken = time.perf_counter(), 0
            while taken < count:
                taken += self._take(found)
            self._elapsed = time.perf_counter() - start
            self._end()
            return found

        def run(count: int) -> list[list[int]]:
            new = [row[1 : 1 + count] for row in take(1, count)]
            for row, more in zip(tokens, new, strict=True):
                row += more
            return new

        tokens[:] = [row[:2] for row in take(2, 1)]  # fills the prefix cache
        take(1, _WARM_UPS)
        return PeerRunner(tokens=list(map(list, tokens)), run=run, elapsed=lambda: self._elapsed, end=self._end)

    def prefill(self, work: PeerWork) -> PeerRunner:
        """Compute the prompt some times; a round does so until its first token is known."""

        def run(count: int) -> list[list[int]]:
            found: list[list[int]] = [[]]
            for _ in range(count):
                self._add(work.prompts, 1)
                while not self._take(found):
                    pass
            return found

        return PeerRunner(tokens=[run(_WARM_UPS)[0][-1:]], run=run, end=self._end)

    def _add(self, prompts: list[list[int]], most: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._rows = {}
        for row, prompt in enumerate(prompts):
            asked = {"temperature": 0.0, "max_tokens": most, "min_tokens": most, "ignore_eos": True}
            params = SamplingParams(**asked, detokenize=False, output_kind=RequestOutputKind.DELTA)
            name = next(self._names)
            self._rows[name] = row
            self._engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def _take(self, tokens: list[list[int]]) -> bool:
        """Take a step; add its tokens to those of their sequences; tell whether there were any."""
        outputs = self._engine.step()
        for output in outputs:
            tokens[self._rows[output.request_id]] += output.outputs[0].token_ids
        return bool(outputs)

    def _end(self) -> None:
        """Have the engine give up what it still generates."""
        self._engine.abort_request(list(self._rows))
        while self._engine.has_unfinished_requests():
            self._engine.step()


@torch.no_grad()
def draw(model: nn.Module, std: float) -> None:
    """Draw matrices from N(0, std), biases from within 0.25, and other vectors, norm weights, from 0.75 to 1.25."""
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        if parameter.dim() >= 2:
            parameter.normal_(0.0, std)
        else:
            parameter.uniform_(-0.25, 0.25)
            parameter.add_(0.0 if name.endswith("bias") else 1.0)

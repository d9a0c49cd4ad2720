"""llama.cpp through llama-cpp-python: the same weights from a GGUF file; keys and values in their dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from core.common.peers import PeerRunner, PeerWork
from core.errors import ModelError
from core_cpu.peers.gguf_file import gguf_file

_CHUNK = 512  # tokens of a prompt per call
_CACHE = {"float32": "GGML_TYPE_F32", "bfloat16": "GGML_TYPE_BF16", "float16": "GGML_TYPE_F16"}
_BF16 = 30  # of enum ggml_type, where the binding does not name it


def context(work: PeerWork) -> PeerRunner:
    """Load the weights, compute the prompts and, in decode, one step."""
    model = _Context(work)
    first = model.prompts(work.prompts)
    if work.phase == "prefill":

        def prefill(count: int) -> list[list[int]]:
            return [[model.prompts(work.prompts)[0] for _ in range(count)]]

        return PeerRunner(tokens=[first], run=prefill, keeps=model)
    state = {"last": model.step(first)}
    tokens = [list(pair) for pair in zip(first, state["last"], strict=True)]

    def run(count: int) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in work.prompts]
        for _ in range(count):
            state["last"] = model.step(state["last"])
            for row, token in zip(found, state["last"], strict=True):
                row.append(token)
        return found

    return PeerRunner(tokens=tokens, run=run, keeps=model)


class _Context:
    """A context of llama.cpp that holds as many sequences as the work has."""

    def __init__(self, work: PeerWork) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        llama_cpp.llama_backend_init()
        path = str(gguf_file(work.folder, work.weights)).encode()
        self._model = _made(llama_cpp.llama_model_load_from_file(path, llama_cpp.llama_model_default_params()), "model")
        self._num_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        params = llama_cpp.llama_context_default_params()
        count = len(work.prompts)
        params.n_ctx = count * (-(-(work.limit + 1) // 256) * 256)
        params.n_batch = params.n_ubatch = max(_CHUNK, count)
        params.n_seq_max = count
        params.n_threads = params.n_threads_batch = work.threads
        params.type_k = params.type_v = getattr(llama_cpp, _CACHE[work.dtype], _BF16)
        self._context = _made(llama_cpp.llama_init_from_model(self._model, params), "context")
        self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self._held = [0] * count

    def prompts(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Compute all prompts from an empty cache; return the token that follows each."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        self._held = [0] * len(prompts)
        found = []
        for row, prompt in enumerate(prompts):
            for start in range(0, len(prompt), _CHUNK):
                part = prompt[start : start + _CHUNK]
                self._decode([(row, token) for token in part], only_last=True)
            found.append(self._best(len(part) - 1))
        return found

    def step(self, tokens: Sequence[int]) -> list[int]:
        """Compute one token of each sequence; return the tokens that follow."""
        self._decode(list(enumerate(tokens)), only_last=False)
        return [self._best(index) for index in range(len(tokens))]

    def _decode(self, tokens: Sequence[tuple[int, int]], *, only_last: bool) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for at, (row, token) in enumerate(tokens):
            batch.token[at], batch.pos[at] = token, self._held[row]
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, row
            batch.logits[at] = not only_last or at == len(tokens) - 1
            self._held[row] += 1
        code = self._api.llama_decode(self._context, batch)
        if code != 0:
            raise ModelError(
                f"{len(tokens)} tokens in llama.cpp", found=f"llama_decode returned {code}", remedy="ask for less"
            )

    def _best(self, index: int) -> int:
        import numpy as np

        logits = self._api.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(logits, (self._num_vocab,)).argmax())


def _made(pointer: Any, what: str) -> Any:
    if not pointer:
        raise ModelError(
            f"a {what} of llama.cpp", found="it made none; its reason stands above", remedy="ask for a smaller one"
        )
    return pointer

"""Intel's extension for PyTorch: `ipex.llm.optimize` and transformers' `generate`, whose every step waits to be asked.

Its last release is for torch 2.8, which `core` can't run under: an environment of its own, named by `--peer-python`.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from core.common.peers import PeerRunner, PeerWork
from core_cpu.peers.static import load


def generation(work: PeerWork) -> PeerRunner:
    """Optimise the model, start `generate`, and take the first step."""
    import intel_extension_for_pytorch as ipex

    model = ipex.llm.optimize(load(work), dtype=getattr(torch, work.dtype), inplace=True, deployment_mode=True)
    return generated(model, work)


def generated(model: Any, work: PeerWork) -> PeerRunner:
    """Run any model that has transformers' `generate`, greedily and without end."""
    if work.phase == "prefill":

        def prefill(count: int) -> list[list[int]]:
            return [[int(_generate(model, work, 1)[0, -1]) for _ in range(count)]]

        return PeerRunner(tokens=[prefill(3)[0][-1:]], run=prefill, keeps=model)
    gate = _Gate(model, work)
    first, second = gate.steps(1), gate.steps(1)
    tokens = [a + b for a, b in zip(first, second, strict=True)]
    return PeerRunner(tokens=tokens, run=gate.steps, keeps=model)


def _generate(model: Any, work: PeerWork, count: int, **more: Any) -> Tensor:
    ids = torch.tensor(work.prompts)
    asked = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "num_beams": 1, "pad_token_id": 0}
    with torch.inference_mode():
        found: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **asked, **more)
    return found


class _Gate:
    """A processor of logits that lets `generate`, in a thread of its own, go on only when it was asked for a step."""

    def __init__(self, model: Any, work: PeerWork) -> None:
        self._asked, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._chosen: list[list[int]] = []
        self._error: BaseException | None = None
        count = work.limit - len(work.prompts[0])
        self._thread = threading.Thread(target=self._run, args=(model, work, count), daemon=True)
        self._thread.start()

    def steps(self, count: int) -> list[list[int]]:
        """Let it take `count` steps; return each sequence's tokens."""
        before = len(self._chosen)
        for _ in range(count):
            self._asked.release()
            self._done.acquire()
            if self._error is not None:
                raise self._error
        return [list(row) for row in zip(*self._chosen[before:], strict=True)]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Note the best tokens of a step, and wait until another is asked for."""
        self._chosen.append(scores.argmax(-1).tolist())
        self._done.release()
        self._asked.acquire()
        return scores

    def _run(self, model: Any, work: PeerWork, count: int) -> None:
        torch.set_num_threads(work.threads)  # OpenMP counts by thread
        self._asked.acquire()
        try:
            _generate(model, work, count, logits_processor=[self])
            raise RuntimeError(f"generate ended after {len(self._chosen)} steps")
        except BaseException as error:
            self._error = error
            self._done.release()

"""The subjects beside `core`: transformers' own forward on its static cache, eager and through torch.compile."""

from __future__ import annotations

import copy
import time
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from core.bench.cells import Cell, Record
from core.bench.dynamo_counts import Compiles
from core.compilation.report import counted
from core.engine.models.forward import accepted_arguments, cache_name
from core.engine.models.vocabulary import vocab_size_of
from core.engine.static.cache import static_cache
from core.errors import ModelError

if TYPE_CHECKING:
    from core.device import Device

COMPILE_MODES = {
    "compile": "default",
    "reduce-overhead": "reduce-overhead",
    "max-autotune": "max-autotune",
}
"""Subject to the mode of torch.compile."""
_WARM_UPS = 3
"""torch.compile's modes with captured graphs compile at the first call, record at the second, replay from the third."""
_FILL_TOKENS = 8192


def sharing_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model with a configuration and modules of its own, and the same weights in the same memory.

    So the engine may change the attention of its model while transformers' own forward runs on the copy.
    """
    tensors = (*model.parameters(), *model.buffers())
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    return copy.deepcopy(model, memo)


class SharedCache:
    """The static cache of one cell, on which the subjects take turns.

    Every subject writes the positions of its steps before it reads them; before these stand the prompt and earlier
    steps. These may be another subject's: values are equal if the tokens are, and the cost is the same in any case.
    """

    def __init__(self, model: Any, device: Device) -> None:
        self.model = model
        self.device = device
        self.cache: Any = None
        self.first: Tensor | None = None
        self._cell: Cell | None = None
        self._users: set[str] = set()

    def take(self, cell: Cell, user: str) -> None:
        """Make and fill the cache for a cell unless that is done."""
        self._users.add(user)
        if self._cell is cell:
            return
        cache = static_cache(self.model, -(-cell.limit // 16) * 16)
        step = forward(self.model, cache)
        if cell.phase == "prefill":
            step(torch.zeros(1, 1, dtype=torch.int64, device=self.device.torch_device))  # the layers allocate here
            rewind(cache, 0)
        else:
            prompts = torch.tensor(cell.prompts(vocab_size_of(self.model)))
            width = max(1, _FILL_TOKENS // cell.batch)
            for part in prompts.split(width, dim=1):
                self.first = step(part.to(self.device.torch_device)).clone()
        self.cache, self._cell = cache, cell

    def give_back(self, user: str) -> None:
        """Drop the cache with the last user."""
        self._users.discard(user)
        if not self._users:
            self.cache = self.first = self._cell = None


class StaticSubject:
    """transformers' forward and the argmax of its last logits, as it is or compiled as one function."""

    def __init__(self, name: str, shared: SharedCache, *, keep_logits: bool = False) -> None:
        """name: "eager" or one of `COMPILE_MODES`. keep_logits: for the check; eager's serve for all."""
        self.name = name
        self._mode = COMPILE_MODES.get(name)
        self._shared = shared
        self._device = shared.device
        self._keep_logits = keep_logits
        self._step: Any = None
        self._code: types.CodeType | None = None
        self._ids: Any = None
        self._compiles = Compiles()

    @torch.no_grad()
    def open(self, cell: Cell, record: Record) -> None:
        """Fill the cache, compile and warm up; a decode subject has then taken one step."""
        self._shared.take(cell, self.name)
        self._cell, self._record = cell, record
        self._position = cell.tokens
        device = self._device
        device.synchronize()
        start = time.perf_counter()
        self._step, self._code = self._make(self._shared.cache)
        self._compiles = Compiles()
        with self._compiles:
            record.tokens = self._warm_up(cell)
        device.synchronize()
        record.start_s = time.perf_counter() - start if self._mode else 0.0
        self._compiles.warm()
        if self._keep_logits:
            record.logits = self._logits()

    @torch.no_grad()
    def ready(self) -> None:
        """Reset the cache, which other subjects have used, to this subject's position."""
        rewind(self._shared.cache, self._position if self._cell.phase == "decode" else 0)

    @torch.no_grad()
    def run(self, count: int) -> None:
        """Do `count` steps, or as many prefills of the same prompt."""
        with self._compiles:
            for _ in range(count):
                if self._cell.phase == "prefill":
                    self._prefill()
                    continue
                for row, token in zip(self._record.tokens, self._advance(self._ids), strict=True):
                    row.append(token)
                self._position += 1

    def replay(self, count: int) -> bool:
        """Return False: the graphs are torch.compile's own."""
        return False

    def finish(self, record: Record) -> None:
        """Note what torch.compile did, and whether it did anything while it was being measured."""
        if self._mode is None:
            return
        record.details["compile"] = self._compiles.to_json()
        if recompiled := self._compiles.to_json()["recompiles"]:
            record.notes.append(f"{counted(recompiled, 'graphs')} compiled while it was measured")

    def close(self) -> None:
        """Forget the compiled code and the cache."""
        if self._code is not None:
            torch._C._dynamo.eval_frame.reset_code(self._code)
        self._step = self._code = None
        self._ids = None
        self._shared.give_back(self.name)

    def free(self) -> None:
        """Close the subject, which keeps nothing for the next cell."""
        self.close()

    def _warm_up(self, cell: Cell) -> list[list[int]]:
        """Call it until it is warm, each time from the same state; return the tokens so far."""
        if cell.phase == "prefill":
            self._prompt = cell.prompts(vocab_size_of(self._shared.model))[0]
            for _ in range(_WARM_UPS):
                tokens = self._prefill()
            return [[token] for token in tokens]
        first = self._shared.first
        assert first is not None
        self._ids = first.clone()
        for _ in range(_WARM_UPS):
            rewind(self._shared.cache, self._position)
            tokens = self._advance(first)
        self._position += 1
        return [list(pair) for pair in zip(first[:, 0].tolist(), tokens, strict=True)]

    def _make(self, cache: Any) -> tuple[Callable[[Tensor], Tensor], types.CodeType | None]:
        step = forward(self._shared.model, cache)
        if self._mode is None:
            return step, None
        # A code object of its own: Dynamo counts and keeps what it compiles by code object.
        fresh = types.FunctionType(step.__code__.replace(), step.__globals__, "step", None, step.__closure__)
        return torch.compile(fresh, mode=self._mode, dynamic=False), fresh.__code__

    def _advance(self, ids: Tensor) -> list[int]:
        tokens = self._step(ids)
        self._ids.copy_(tokens)  # torch.compile's graph overwrites its outputs at the next call
        found: list[int] = self._ids[:, 0].tolist()
        return found

    def _prefill(self) -> list[int]:
        rewind(self._shared.cache, 0)
        ids = torch.tensor([self._prompt]).to(self._device.torch_device, non_blocking=True)
        tokens = self._step(ids)
        found: list[int] = tokens[:, 0].tolist()
        return found

    def _logits(self) -> Tensor:
        """Return the logits (rows, vocabulary) that the last warm-up chose from, by the uncompiled forward."""
        decode = self._cell.phase == "decode"
        rewind(self._shared.cache, self._cell.tokens if decode else 0)
        ids = self._shared.first if decode else torch.tensor([self._prompt], device=self._device.torch_device)
        assert ids is not None
        return logits_of(self._shared.model, self._shared.cache, ids).to("cpu", copy=True)


def forward(model: Any, cache: Any) -> Callable[[Tensor], Tensor]:
    """Return a function of token ids (B, T) that moves the cache on and returns the next tokens (B, 1)."""

    arguments = _arguments(model, cache)

    def step(ids: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=ids, **arguments).logits[:, -1]
        return logits.argmax(-1, keepdim=True)

    return step


def logits_of(model: Any, cache: Any, ids: Tensor) -> Tensor:
    """Return the logits (B, vocabulary) after the last of the tokens (B, T), which join the cache."""
    logits: Tensor = model(input_ids=ids, **_arguments(model, cache)).logits[:, -1]
    return logits


def _arguments(model: Any, cache: Any) -> dict[str, Any]:
    """Return the further arguments of every call; computed once, outside of the compiled and measured part."""
    arguments: dict[str, Any] = {cache_name(model): cache, "use_cache": True, "return_dict": True}
    if "logits_to_keep" in accepted_arguments(model):
        arguments["logits_to_keep"] = 1
    return arguments


def rewind(cache: Any, position: int) -> None:
    """Set how many tokens a static cache holds; what lies behind is hidden by the mask and written anew.

    All layers at once: this counts into the time of a prefill, of which one kernel per layer would be a large part.
    """
    lengths: list[Any] = [getattr(layer, "cumulative_length", None) for layer in cache.layers]
    for layer, length in zip(cache.layers, lengths, strict=True):
        if not isinstance(length, Tensor):
            raise ModelError(
                f"a {type(layer).__name__} of transformers in turns",
                found="its length is no tensor that could be set back",
                remedy="leave out the subjects on the static cache: --subjects core",
            )
    torch._foreach_zero_(lengths)
    if position:
        torch._foreach_add_(lengths, position)

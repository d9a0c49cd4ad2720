"""One engine on several ranks: rank 0 is asked, and tells the others before each step what it was asked.

Every rank has an engine of its own, schedules by itself and samples by itself; equal requests, seeds and logits make
them do the same. What they must not do differently is compared: the tokens of each step.
"""

from __future__ import annotations

import base64
import pickle
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from core.compilation.options import Progress
from core.device import Device
from core.engine.config import SamplingParams
from core.engine.models.loading import LoadedModel
from core.engine.parallel.agreement import RanksMissing
from core.engine.parallel.rank import Rank, note_phase, report
from core.engine.serve.engine import Engine
from core.engine.serve.prompts import EncodedPrompt
from core.engine.serve.request import Completion, RequestOutput
from core.engine.steps.runner import EngineConfig
from core.errors import EngineError, UsageError

_IDLE = timedelta(seconds=60)
_KEPT = 256
"""Orders that stay in the store: with steps queued ahead, a rank may be that far behind at most."""


class Orders:
    """What rank 0 tells the others, in order, through a store of torch.distributed."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._timeout: timedelta = store.timeout
        self._number = 0

    @classmethod
    def of_job(cls) -> Orders:
        """Return the orders of the job's one engine, through the store of the default group."""
        world: Any = distributed.group.WORLD
        # Listed in no stub of torch's.
        return cls(distributed.PrefixStore("core/engine", world.get_group_store()))  # type: ignore[attr-defined]

    def send(self, order: object) -> None:
        """Tell all other ranks."""
        self._number += 1
        self._store.set(str(self._number), base64.b64encode(pickle.dumps(order)).decode())
        if self._number > _KEPT:
            self._store.delete_key(str(self._number - _KEPT))

    def receive(self, *, busy: bool) -> Any:
        """Return the next order; wait for it as long as rank 0 may be idle, and no longer than the timeout if not.

        Raises `RanksMissing`.
        """
        self._number += 1
        while True:
            try:
                self._store.wait([str(self._number)], self._timeout if busy else _IDLE)
            except distributed.DistStoreError:
                if busy:
                    raise RanksMissing(
                        "the next step",
                        found=f"rank 0 did not come within {self._timeout.total_seconds():g} s",
                        remedy="see what rank 0 does",
                    ) from None
            else:
                return pickle.loads(base64.b64decode(self._store.get(str(self._number))))


class LeadingEngine(Engine):
    """The engine of rank 0. It refuses to go on after a step that failed, since the other ranks may be elsewhere."""

    def __init__(self, *args: Any, orders: Orders, failed: Callable[[Exception], None], **named: Any) -> None:
        """failed: told of a step that failed, before its error is raised."""
        super().__init__(*args, **named)
        self._tell_failed = failed
        self._orders = orders
        self._untold: list[tuple[Any, ...]] = []
        self._made = 0
        #: Why it can't go on; None while it can.
        self.failure: Exception | None = None

    def step(self) -> list[RequestOutput]:
        """Run the model once on all ranks, and return the outputs by request."""
        if self.failure is not None:
            found = f"a step failed: {self.failure}"
            raise EngineError("a step on several ranks", found=found, remedy="start all ranks anew")
        self._tell("step")
        try:
            outputs = super().step()
        except Exception as error:
            self.failure = error
            self._tell_failed(error)
            raise
        self._made = _digest(outputs, self._made)
        return outputs

    def abort(self, request_id: int) -> Completion | None:
        """End a request on all ranks."""
        completion = super().abort(request_id)
        if completion is not None:
            self._untold.append(("abort", request_id))
        return completion

    def close(self) -> None:
        """End all requests and free programs and cache, on all ranks."""
        if not self._closed and self.failure is None:
            self._tell("close")
        super().close()

    def sleep(self, level: int = 1) -> int:
        """Refuse: the other ranks would go on."""
        raise UsageError(f"sleep(level={level})", found="several ranks serve", remedy="end the job instead")

    def load_weights(self, weights: Any, *, partial: bool = False) -> None:
        """Refuse: each rank holds a part of the weights."""
        raise UsageError("load weights", found="several ranks serve", remedy="start the job with the new weights")

    def _add(self, prompt: EncodedPrompt, params: SamplingParams, collect_logits: bool, lora: str | None = None) -> int:
        if params.seed is None and not params.greedy:
            params = replace(params, seed=int(torch.Generator().seed() % 2**63))
        request = super()._add(prompt, params, collect_logits, lora)  # no name is known: make_engine refuses adapters
        self._untold.append(("add", prompt, params, collect_logits))
        return request

    def _tell(self, what: str) -> None:
        orders, self._untold = self._untold, []
        self._orders.send((self._made, orders, what))


class FollowingEngine(Engine):
    """The engine of another rank."""

    def follow(self, orders: Orders) -> None:
        """Do what rank 0 tells until it closes its engine, and close this one.

        Raises `EngineError` where this rank made other tokens than rank 0, and what a step raises.
        """
        made = 0
        while True:
            theirs, asked, what = orders.receive(busy=self.has_unfinished)
            if theirs != made:
                raise EngineError(
                    "the tokens of a step",
                    found="this rank has made other tokens than rank 0",
                    remedy="see whether all ranks run the same packages on the same kind of device",
                )
            for name, *arguments in asked:
                self._add(*arguments) if name == "add" else self.abort(*arguments)
            if what == "close":
                self.close()
                return
            made = _digest(self.step(), made)


def make_engine(
    loaded: LoadedModel,
    device: Device,
    config: EngineConfig,
    rank: Rank,
    *,
    progress: Progress | None = None,
    failed: Callable[[Exception], None] = report,
) -> Engine:
    """Compile this rank's part of a model, and tell the launcher the phases; on one rank, return a plain engine.

    failed: as of `LeadingEngine`. With several ranks nothing is chosen by its time, neither implementations nor how
    many steps run in a row: each rank would measure another one.
    """
    if rank.size == 1:
        return Engine(loaded, device, config, progress=progress)
    if config.max_loras:
        found = f"the model is cut among {rank.size} ranks, and adapters are not"
        raise UsageError(f"max_loras={config.max_loras}", found=found, remedy="serve adapters on one rank")
    note_phase("capture")
    config = replace(config, options=replace(config.options, measure=False), decode_steps=config.decode_steps or 1)
    engine: Engine
    if rank.leads:
        engine = LeadingEngine(loaded, device, config, progress=progress, orders=Orders.of_job(), failed=failed)
    else:
        engine = FollowingEngine(loaded, device, config, progress=progress)
    note_phase("serve")
    return engine


def _digest(outputs: Sequence[RequestOutput], before: int) -> int:
    return zlib.crc32(repr([(each.request_id, each.token_ids) for each in outputs]).encode(), before)

"""Slots of recurrent state, one for each sequence, attached to the modules that read and write them.

A step's tokens are flattened over its sequences, and such a module computes along a sequence. What stands in for
transformers' cache hands it its states, and it runs its own code in one of two ways.

- On a batch of single tokens: a step of decode. While a step with prompts is traced, its tokens are such a batch too,
  with the state before each token stated and not computed (`core.common.ops.recurrent.tokens`); passes make ops of that
  which compute along the sequences.
- On runs, where a step with prompts runs eagerly: the tokens of each prompt alone, those of generating sequences as one
  batch. Which tokens belong together is then known to the host.

Legend of shapes: N slots, S sequences of a step, T its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from core.engine.inspect.recurrence import Recurrence, RecurrentLayer, StateKey
from core.engine.paged.blocks import FIRST_SLOT
from core.engine.paged.step_states import RecurrentStep, Run, SlotStates, StepCache, TokenStates, step_cache_class
from core.engine.steps.sequence import NULL_SLOT
from core.engine.steps.step import Step
from core.errors import ModelError

_LAYER = "_core_recurrent"


@dataclass(slots=True, eq=False)
class ServedLayer:
    """The states of a module in all slots, (N, …) each."""

    layer: RecurrentLayer
    pools: dict[StateKey, Tensor]
    #: The step being run, shared by all layers.
    step: RecurrentStep
    #: As of `Recurrence`.
    continues: bool
    widths: dict[StateKey, int] = field(init=False)
    cache_class: type[StepCache] = field(init=False)

    def __post_init__(self) -> None:
        self.cache_class = step_cache_class(self.layer.accessors)
        self.widths = {key: pool.shape[-1] for key, pool in self.pools.items() if key[0] == "conv"}

    def __deepcopy__(self, memo: object) -> ServedLayer:
        """Stay with the original: a copied model must not duplicate the states."""
        return self

    def batched(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], states: SlotStates | TokenStates
    ) -> Any:
        """Compute a batch of single tokens. Tensors of the arguments and of the result are (1, rows, …)."""

        def as_batch(values: Tensor) -> Tensor:
            fits = values.dim() > 1 and values.shape[0] == 1 and values.shape[1] == states.num_rows
            return _as_batch(values) if fits else values

        args, kwargs = _mapped(tuple(args), as_batch), _mapped(dict(kwargs), as_batch)
        return _mapped(self._call(module, args, kwargs, states, begins=False), _as_tokens)

    def compute(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], runs: Sequence[Run]) -> Any:
        """Compute runs of tokens. Tensors of the arguments and of the result are (1, T, …)."""
        num_tokens = sum(_count(run) for run in runs)
        outs = []
        for run in runs:

            def own(values: Tensor, rows: slice | Tensor = run.rows) -> Tensor:
                if values.dim() < 2 or values.shape[:2] != (1, num_tokens):
                    return values
                return values[:, rows] if isinstance(rows, slice) else _as_batch(values[:, rows])

            given, states = (_mapped(tuple(args), own), _mapped(dict(kwargs), own)), SlotStates(run.slots)
            if isinstance(run.rows, Tensor):
                out = self._call(module, *given, states, begins=False)
                outs.append(_mapped(out, _as_tokens))
            elif run.begins or self.continues:
                outs.append(self._call(module, *given, states, begins=run.begins))
            else:
                outs += self._one_by_one(module, *given, run)
        joined = _joined(outs)
        order = self.step.order
        return joined if order is None else _mapped(joined, lambda values: values[:, order])

    def _one_by_one(self, module: nn.Module, args: Any, kwargs: Any, run: Run) -> list[Any]:
        """Compute tokens of one sequence each by itself: the module reads a state for a single token only."""
        count, states, outs = _count(run), SlotStates(run.slots), []
        for index in range(count):

            def one(values: Tensor, at: int = index) -> Tensor:
                return values[:, at : at + 1] if values.dim() > 1 and values.shape[:2] == (1, count) else values

            outs.append(self._call(module, _mapped(args, one), _mapped(kwargs, one), states, begins=False))
        return outs

    def _call(
        self, module: nn.Module, args: Any, kwargs: Any, states: SlotStates | TokenStates, *, begins: bool
    ) -> Any:
        """Run the module's own code on these states, and put them back."""
        # Told before the states are computed: an op that writes them itself needs to know where.
        kept = states.kept
        taken: dict[StateKey, Tensor | None] = {
            key: None if begins else states.taken(pool, *self._bounds(key)) for key, pool in self.pools.items()
        }
        cache, place = self.cache_class(taken, self.widths), self.layer.place
        if len(args) > place:
            args = (*args[:place], cache, *args[place + 1 :])
        else:
            kwargs = {**kwargs, self.layer.argument: cache}
        out = type(module).forward(module, *args, **kwargs)
        for key, pool in self.pools.items():
            new = cache.states[key]
            assert new is not None, "a module kept no state that it keeps elsewhere"
            states.put(pool, kept, new.to(pool.dtype))
        # Some return a state as well, which is of no token, and which nobody takes.
        return _mapped(out, lambda values: None if any(values is each for each in cache.states.values()) else values)

    def _bounds(self, key: StateKey) -> tuple[float, float]:
        """Return the bounds of the steps that move a state on."""
        return self.layer.step_bounds if key[0] == "recurrent" else (0.0, 0.0)


class RecurrentStates:
    """The states of a model's modules in all slots; the engine owns them, and their addresses never change.

    Without such modules there are no tensors, and nothing is done.
    """

    def __init__(self, recurrence: Recurrence, *, num_slots: int, device: torch.device) -> None:
        """Allocate the states and attach them. num_slots: those that sequences can have."""
        #: What the layers are given in the step that runs.
        self.step = RecurrentStep()
        self._device = device
        #: Whether layers bound the steps of their state spaces, in prompts alone.
        self.bounds_steps = recurrence.bounds_steps
        layers = {
            module: {
                state.key: torch.zeros((FIRST_SLOT + num_slots, *state.shape), dtype=state.dtype, device=device)
                for state in layer.states
            }
            for module, layer in recurrence.layers.items()
        }
        #: States of all layers, (N, …) each.
        self.tensors = tuple(pool for pools in layers.values() for pool in pools.values())
        self._saved: list[Tensor] = []
        self._modules = tuple(layers)
        # Allocated all before any is attached: where memory runs out, no module keeps states.
        for module, pools in layers.items():
            served = ServedLayer(recurrence.layers[module], pools, self.step, recurrence.continues)
            object.__setattr__(module, _LAYER, served)
            object.__setattr__(module, "forward", MethodType(_forward, module))

    def begin(self, step: Step, *, probes: bool = False) -> None:
        """Tell the layers which tokens of an eager step belong to which sequence.

        Raises `ModelError` where layers would not compute it exactly, but for probes.
        """
        if step.phase != "prefill" or not self.tensors:
            return
        if not probes and (why := self._why_not(step)):
            asked = f"a step of prompts of {step.num_tokens} tokens, which no graph serves"
            raise ModelError(asked, found=why, remedy="ask for prefill buckets that hold it")
        single: list[tuple[int, int]] = []
        runs: list[Run] = []
        rows: list[int] = []
        first = 0
        for part in step.parts:
            last = first + part.num_tokens
            if part.first_position and part.num_tokens == 1:
                single.append((first, part.sequence.slot))
            else:
                runs.append(Run(slice(first, last), self._indices([part.sequence.slot]), not part.first_position))
                rows += range(first, last)
            first = last
        if single:
            places = [place for place, _ in single]
            runs.insert(0, Run(self._indices(places), self._indices([slot for _, slot in single]), False))
            rows = places + rows
        self.step.runs = tuple(runs)
        self.step.order = None
        if rows != list(range(first)):
            self.step.order = self._indices(sorted(range(first), key=rows.__getitem__))

    def _why_not(self, step: Step) -> str:
        """Return why layers would not compute a step of prompts exactly outside of a graph; "" where they would.

        transformers' code bounds the steps of a whole prompt, and none of a single token's.
        """
        if not self.bounds_steps:
            return ""
        for part in step.parts:
            last, length = part.first_position + part.num_tokens, len(part.sequence.prompt)
            single = part.num_tokens == 1 and part.first_position
            if (single and last <= length) or (not single and last > length):
                return "its layers bound the steps of prompts alone, and this step cuts a prompt where they can't tell"
        return ""

    def clear(self) -> None:
        """Forget the step that ran."""
        self.step.batch = self.step.runs = self.step.order = None

    def begin_check(self) -> None:
        """Fill the slots with NaN until `end_check`: whatever reads a state that no sequence has written will show."""
        for tensor in self.tensors:
            tensor[NULL_SLOT + 1 :] = math.nan

    def end_check(self) -> None:
        """Empty the slots that were not written since `begin_check`, and remember the others for `restore`."""
        for tensor in self.tensors:
            tensor[tensor.flatten(1).isnan().any(dim=1)] = 0.0
        self._saved = [tensor[: FIRST_SLOT + 2].clone() for tensor in self.tensors]

    def restore(self) -> None:
        """Bring the states that `end_check` remembered back."""
        for tensor, saved in zip(self.tensors, self._saved, strict=False):
            tensor[: len(saved)].copy_(saved)

    def close(self) -> None:
        """Detach from the model and free the tensors."""
        for module in self._modules:
            for name in (_LAYER, "forward"):
                module.__dict__.pop(name, None)
        self.tensors, self._saved = (), []

    def _indices(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device, non_blocking=True)


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for a module's forward; outside of a step it is the module's own."""
    served: ServedLayer = module._core_recurrent
    step = served.step
    if step.batch is not None:
        return served.batched(module, args, kwargs, step.batch)
    if step.runs is not None:
        return served.compute(module, args, kwargs, step.runs)
    return type(module).forward(module, *args, **kwargs)


def _count(run: Run) -> int:
    return run.rows.stop - run.rows.start if isinstance(run.rows, slice) else run.rows.shape[0]


def _as_batch(values: Tensor) -> Tensor:
    """Return (1, rows, …) as (rows, 1, …).

    Not by a transposition: it would leave the dimension of one a stride by which torch's linear layers do not see rows
    side by side, and each row would be multiplied by a copy of the weight.
    """
    return values.squeeze(0).unsqueeze(1)


def _as_tokens(values: Tensor) -> Tensor:
    """Return (rows, 1, …) as (1, rows, …)."""
    return values.squeeze(1).unsqueeze(0)


def _mapped(value: Any, change: Callable[[Tensor], Tensor | None]) -> Any:
    """Return what a module takes or gives with all tensors in it changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)([_mapped(each, change) for each in value])
    if isinstance(value, dict):
        return {name: _mapped(each, change) for name, each in value.items()}
    return value


def _joined(outs: Sequence[Any]) -> Any:
    """Return results (1, …) of the same form joined along their tokens."""
    first = outs[0]
    if isinstance(first, Tensor):
        return torch.cat(list(outs), dim=1) if len(outs) > 1 else first
    if isinstance(first, tuple | list):
        return type(first)([_joined(each) for each in zip(*outs, strict=True)])
    return first

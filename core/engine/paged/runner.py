"""Running a transformers model on the paged cache: bucketed programs for each phase, one shared cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from core.common.graphs.backend import GraphKey
from core.compilation.compile import compile
from core.compilation.options import Progress
from core.compilation.report import ProgramReport
from core.device import Device
from core.engine.models.sharding.gathering import HeadParts
from core.engine.paged import phases
from core.engine.paged.cache import PagedCache
from core.engine.paged.call import PagedCall, PagedLogits
from core.engine.paged.model import PagedModel
from core.engine.paged.phases import Buckets
from core.engine.paged.room import Place
from core.engine.paged.self_check import OwnForward, Probes, check_same_function, chunks_of, in_pieces, probe_limits
from core.engine.static.cache import CachedPhase
from core.engine.steps.histories import Histories
from core.engine.steps.inputs import step_inputs, step_tensors
from core.engine.steps.runner import EngineConfig
from core.engine.steps.sampling import GREEDY_ROW, sampling_guard, serves
from core.engine.steps.sleeper import Sleeper
from core.engine.steps.staged import StagedSteps
from core.engine.steps.step import Flight, Step, StepOutput, sampled_by_request
from core.quantization.layers import continuous

log = logging.getLogger("core.engine")


class PagedRunner:
    """A `ModelRunner` whose keys and values live in `core::attention`'s paged cache."""

    route = "paged"

    def __init__(
        self,
        model: Any,
        device: Device,
        config: EngineConfig,
        *,
        max_model_len: int,
        progress: Progress | None = None,
        place: Place | None = None,
        sleeper: Sleeper | None = None,
    ) -> None:
        """Inspect the model, allocate the cache, check one short generation, and compile; or raise `NotPageable`.

        place: where the cache lies in blocks that other models have too; None for blocks of its own.
        """
        self._model, self._device, self._block_size = model, device, config.block_size
        self._max_model_len = max_model_len
        self._max_blocks = -(-max_model_len // config.block_size)
        self._sampling = config.sampling
        self.max_num_seqs = config.max_num_seqs
        self._closed = False
        self._histories = Histories(self.max_num_seqs, max_model_len, device.torch_device)
        place = place or Place.alone(model, device, config, max_model_len=max_model_len)
        paged, room, self._drafts, self._states, self.adapters = place
        self.reason, self.cache_rounding, self._before = paged.reason, paged.rounding, paged.native_attention
        self.max_step_tokens, self.whole_prompts = paged.max_step_tokens, paged.whole_prompts
        self.num_drafts, self._counts_itself = config.speculative, not paged.counting.ordinary
        #: Why the graphs may be looked at alone, and no request served; "" where they may serve.
        self.unserved = ""
        if paged.recurrence.layers and self.num_drafts:
            log.warning("no speculative decoding on recurrent states: a wrong draft can't be taken back from them")
            self.num_drafts = 0
        own = room.groups_of(paged)
        self._states_group = 0 if self._drafts else own.stop - own.start
        #: Which of the groups of `cache` its steps have to do with: this model's, and the one whose slots it writes.
        self.groups = slice(own.start, own.stop + (self._states is not None and not self._drafts))
        self._lens = phases.query_lens(self.num_drafts)
        buckets = phases.buckets(config, device.capabilities, self._lens, paged.prefill_sizes, drafts=self._drafts)
        self._paged = room.make_cache(paged)
        self.cache = room.tables
        self._examples: dict[str, list[dict[str, Tensor]]] = {}
        self.program: Any = None
        self._staged: StagedSteps | None = None
        try:
            self._calls = self._make_calls(self._paged)
            with continuous(self._model):  # judges the cache, not how inputs round to codes
                forward = self._check_same_function(paged)
            self._greedy_rows = self._greedy_params(max(b["rows"] for sizes in buckets.values() for b in sizes))
            how: Any = {"relocate": sleeper and sleeper.placing(self._paged.tensors), "progress": progress}
            self._compile(buckets, config, packed=True, **how)
            if self._keeps_states:
                self._check_prompts(buckets, config, forward, **how)
                if self.whole_prompts and phases.has_graphs(self.program, "prefill"):
                    # The graphs continue a prompt, whatever the model's own code does.
                    self.whole_prompts, self.max_step_tokens = False, paged.chunk_tokens
        except BaseException:
            self.close()
            raise

    def run(self, step: Step, behind: Flight | None = None) -> StepOutput | None:
        """Compute a step in a graph of its own phase; a captured step is queued and not waited for."""
        guards = self._guards(step)
        sampling = guards.get("sampling", "greedy")
        key = self._staged.key(step, guards) if self._staged is not None else None
        if behind is not None and not self._takes_tokens_there(key):
            return None
        rows = self._histories.rows_of(step) if "shaped" in (step.sampling, sampling) else None
        try:
            if key is None:
                self._paged.recurrent.begin(step)
            with self.program.serving():
                if key is not None and self._staged is not None:
                    output = self._staged.run(key, step, sampling=sampling, behind=behind, rows=rows)
                    inputs = {} if rows is None else self._staged.sent(key, step)
                else:
                    output, inputs = self._run_unstaged(step, guards, rows)
            if rows is None:
                output = sampled_by_request(step, output)
            else:
                output = self._histories.shaped_by_request(step, output, rows, inputs)
            return output if self._staged is None else self._staged.read_later(output)
        finally:
            self._paged.clear_step()  # an interrupted step's tables must not serve a later call of the model
            if self._states is not None:
                self._states.clear()
            if self.adapters is not None:
                self.adapters.end_step()

    def repeats(self, step: Step) -> bool:
        """Tell whether a step of decode may run several times without the host."""
        guards, staged = self._guards(step), self._staged
        sampling = guards["sampling"]
        if staged is None or not staged.repeats or sampling == "shaped" or not serves(sampling, step.sampling):
            return False
        return not self.num_drafts and staged.holds(step, guards)

    def _guards(self, step: Step) -> dict[str, Any]:
        guards: dict[str, Any] = {} if self.adapters is None else {"lora": step.lora}
        if step.phase == "decode":
            guards["sampling"] = sampling_guard(step.sampling, self._sampling)
        return guards

    def _takes_tokens_there(self, key: GraphKey | None) -> bool:
        """Tell whether a step of this key may be given tokens that the host does not know."""
        if key is None:
            return False
        return not (self._device.capabilities.update and "input_ids" in self.program.host_arguments(key))

    def _run_unstaged(self, step: Step, guards: dict[str, Any], rows: Any) -> tuple[StepOutput, dict[str, Tensor]]:
        """Compute a step that no graph serves, which the program counts; return its inputs, too."""
        if self._staged is not None:
            self._staged.forget()
        sampling, device, tensors = guards.get("sampling", "greedy"), self._device.torch_device, self._tensors(step)
        params = self._greedy_rows[: step.num_rows] if sampling == "greedy" else step.sampling_params(device)
        if "shaped" in self._sampling:
            none = torch.zeros_like(tensors["input_ids"])
            tensors["history_rows"] = none if rows is None else torch.from_numpy(rows).to(device)
        tokens, logits = self.program(step.phase, guards=guards, sampling_params=params, **tensors)
        return StepOutput(tokens, logits, sampling, gather=self._calls[step.phase].gather(sampling)), tensors

    def report(self) -> ProgramReport:
        """Return the account of the compiled program."""
        return cast("ProgramReport", self.program.report())

    def close(self) -> None:
        """Free graphs and cache and give the model its own attention back; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._staged = None
        if self.program is not None:
            self.program.close()
        if self.adapters is not None:
            self.adapters.detach()
        self._paged.close()
        self._model.set_attn_implementation(self._before)

    @property
    def num_groups(self) -> int:
        """Groups of layers, each with a block table of its own."""
        return int(self.groups.stop - self.groups.start)

    @property
    def _keeps_states(self) -> bool:
        return self.cache.keeps_states

    @property
    def _kinds(self) -> dict[str, bool]:
        return {
            "chained": self._drafts and self._states is not None,
            "lora": self.adapters is not None,
            "recurrent": self._keeps_states,
        }

    def phases(self) -> tuple[CachedPhase, ...]:
        """Return the logits of prefill and decode as they are compiled, with the inputs of the self-check.

        The choice of tokens is left out: there, the smallest error of a logit changes everything or nothing. Valid
        until `close`.
        """
        declared = step_inputs(self._max_blocks, self.num_groups, recurrent=self._keeps_states)
        functions = {name: self._calls[name].logits for name in ("prefill", "decode")}
        return phases.of_logits(functions, declared, {name: self._examples[name][0] for name in functions})

    def _tensors(self, step: Step) -> dict[str, Any]:
        where: dict[str, Any] = {"device": self._device.torch_device, "groups": self.groups, **self._kinds}
        where |= {"max_blocks": self._max_blocks, "block_size": self._block_size}
        return step_tensors(step, **where)

    def _greedy_params(self, num_rows: int) -> Tensor:
        return torch.tensor([GREEDY_ROW], device=self._device.torch_device).repeat(num_rows, 1)

    def _make_calls(self, cache: PagedCache) -> dict[str, PagedCall]:
        kept: dict[str, Any] = {"states": self._states, "states_group": self._states_group, "adapters": self.adapters}
        kept |= {"recurrent": cache.recurrent.step if self._keeps_states else None, "head": HeadParts.of(self._model)}
        how: Any = {"positions": cache.positions, "past": cache.past, **kept}
        logits = {phase: PagedLogits(self._model, cache.steps, most, **how) for phase, most in self._lens.items()}
        return {phase: PagedCall(each, self._histories) for phase, each in logits.items()}

    def _compile(self, buckets: Buckets, config: EngineConfig, *, packed: bool, **how: Any) -> None:
        """Compile the phases. packed: whether prompts may have graphs where layers keep recurrent states."""
        how |= {"examples": self._examples, "packed": packed, "apart": self._calls["decode"].chooses_apart}
        how["reset"] = self._paged.recurrent.restore if self._keeps_states else None
        options = phases.options(config, self._device.capabilities, self._lens, **how)
        inputs = step_inputs(self._max_blocks, self.num_groups, shaped="shaped" in self._sampling, **self._kinds)
        with nullcontext() if self.adapters is None else self.adapters.attaching():
            self.program = compile(self._calls, self._device, inputs=inputs, buckets=buckets, options=options)
        if self.program.keys:
            most = {name: max(b[name] for sizes in buckets.values() for b in sizes) for name in ("rows", "seqs")}
            limits: Any = {"max_rows": most["rows"], "max_seqs": most["seqs"], "block_size": self._block_size}
            self._staged = StagedSteps(self.program, self._device, groups=self.groups, calls=self._calls, **limits)

    def _check_prompts(self, buckets: Buckets, config: EngineConfig, own: OwnForward, **how: Any) -> None:
        """Run the self-check's prompts in graphs; compile anew without these where they give something else."""
        if phases.has_graphs(self.program, "prefill"):
            self._paged.recurrent.begin_check()
            why = own.why_not(partial(self._run_probes, self._run_in_graph))
            self._paged.recurrent.end_check()
            if why:
                log.warning("prompts run eagerly: in graphs, %s", why)
                self.program.close()
                self._staged = None
                self._compile(buckets, config, packed=False, **how)
        if not phases.has_graphs(self.program, "prefill"):
            if self._paged.recurrent.bounds_steps:
                self.unserved = "its layers bound steps in prompts alone, and no graph of prompts does that here"
            if config.modes_of("prefill", self._device.capabilities) != ("off",):  # which is what was asked for
                self.reason += "; prompts run eagerly"

    def _run_probes(self, run: Callable[[Step], Tensor], probes: Sequence[list[int]]) -> Mapping[str, list[Tensor]]:
        how: Any = {"num_drafts": self.num_drafts, "in_chunks": self._keeps_states or self._counts_itself}
        return Probes(self.cache, run, **how).run(probes, longest=self._longest_probe)

    def _run_in_graph(self, step: Step) -> Tensor:
        """Return what `_run_probe` does, of prompts as they are served."""
        if step.phase != "prefill":
            return self._run_probe(step)
        most = max((key.dims[0] for key in self.program.keys if key.phase == "prefill"), default=step.num_tokens)
        return in_pieces(step, most, lambda piece: cast("StepOutput", self.run(piece)).all_logits().clone())

    @torch.no_grad()
    def _check_same_function(self, paged: PagedModel) -> OwnForward:
        """Compare a prefill and one decode step with the model's own forward; raise `NotPageable` if they differ."""
        self._paged.recurrent.begin_check()
        limits = {"max_model_len": self._max_model_len, "max_num_seqs": self.max_num_seqs}
        num_blocks = min(pool.num_blocks for pool in self.cache.pools) - 1  # nobody gets the null block
        self._longest_probe, most = probe_limits(num_blocks, self._block_size, num_drafts=self.num_drafts, **limits)
        own = check_same_function(
            self._model,
            partial(self._run_probes, self._run_probe),
            max_model_len=self._longest_probe,
            max_num_seqs=most,
            rounding=self.cache_rounding,
            chunks=partial(chunks_of, singly=self.whole_prompts) if self._keeps_states else None,
            stepwise=paged.recurrence.bounds_steps,
        )
        self._paged.recurrent.end_check()
        return own

    def _run_probe(self, step: Step) -> Tensor:
        """Return the logits (seqs, vocabulary) after each sequence's pending tokens; keep the inputs as examples."""
        for part in step.parts:
            part.emits = False  # a head's own forward knows of no hidden states that an earlier step left
        tensors = self._tensors(step)
        # The cache keeps what these inputs refer to, for the verification of passes.
        history = {"history_rows": torch.zeros_like(tensors["input_ids"])} if "shaped" in self._sampling else {}
        example = {**tensors, "sampling_params": self._greedy_params(step.num_rows), **history}
        self._examples[step.phase] = [example, {**example, "input_ids": tensors["input_ids"].flip(0)}]
        if self._keeps_states:  # before passes made ops of it, a graph of prompts runs on one token of each alone
            self._examples["prefill"] = self._examples[step.phase]
        self._paged.recurrent.begin(step, probes=True)
        logits = self._calls[step.phase].probed(**tensors)
        self._paged.recurrent.clear()
        ends = list(accumulate(part.num_rows for part in step.parts))
        return logits[[end - part.num_rows for end, part in zip(ends, step.parts, strict=True)]]

"""Planted faults: mistakes as vendors make them, one at a time, for whoever wants to see them found.

`ACME_FAULT=name` turns one on when the plugin is selected. What a hook gives is handed through `planted`, and the fault
replaces it; the honest files know no fault. This module imports no torch, since the probe hands its answer through too.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import TypeVar

from core.errors import UsageError

T = TypeVar("T")

VARIABLE = "ACME_FAULT"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One mistake."""

    name: str
    #: The area of the conformance suite that has to find it.
    area: str
    #: What is wrong, one line.
    what: str
    #: The hooks where it is planted, each with the module of this package that has the function of its name.
    hooks: Mapping[str, str]
    #: Once planted it stays until the process ends, whichever device is used.
    process_wide: bool = False


def _faults(area: str, hooks: Mapping[str, str], *, process_wide: bool = False, **lines: str) -> dict[str, Fault]:
    """Return the faults of one area that are planted in the same hooks, by name."""
    where, named = MappingProxyType(hooks), {name.replace("_", "-"): line for name, line in lines.items()}
    return {
        name: Fault(name=name, area=area, what=line, hooks=where, process_wide=process_wide)
        for name, line in named.items()
    }


FAULTS: Mapping[str, Fault] = MappingProxyType(
    _faults(
        "ops",
        {"core_register_ops": "ops"},
        norm_eps="rms_norm adds ten times the eps it is given",
        norm_rounding="rms_norm rounds the normalised rows to bfloat16 before the weight",
        norm_half="rms_norm takes its statistics in x's own dtype: float16 overflows",
        norm_tail="rms_norm leaves what is beyond the last multiple of 32 columns out of its statistics",
        norm_wide="rms_norm leaves columns from 8192 on as they are: a block holds no more of a row",
        norm_in_place="rms_norm writes its result into x as well, which the schema does not declare",
        strides_ignored="rms_norm reads x as if it were contiguous",
        add_norm_residual="add_rms_norm returns x where the sum is due",
        rotary_halves="rotary negates the wrong half in style 'half': it turns the other way",
        rotary_partial="rotary leaves zeros in the features beyond rotary_dim",
        gate_gelu_tanh="gated activations compute gelu by its tanh form",
        gate_order="gated_activation_fused takes the first half for the gate whatever gate_first says",
        gate_far="gated activations leave zeros beyond element 2**20: the grid is capped there",
        quantize_truncates="quantize cuts int8 codes off towards zero instead of rounding",
        quantize_scale="quantize returns a scale 2 % larger than its codes were made with",
        quantize_zeros="quantize divides by a scale of zero where a region is all zeros",
    )
    | _faults(
        "ops",
        {"core_register_ops": "attention"},
        attention_stale_row="attention reads the cache before this step's keys and values are in it",
        attention_length="attention takes each sequence for one token shorter",
        attention_rejected="attention takes each sequence for one token longer: a rejected draft stays in it",
        attention_scale="attention's scale is 2 % off",
        attention_padding="attention writes padding tokens into the first block that belongs to a sequence",
        attention_padding_rows="attention leaves results of the last sequence in padding rows",
        attention_window="attention's window is one position wider",
        attention_chunk_as_window="attention takes chunks for windows that end at a token",
        attention_chunk_size="attention's chunks are one position longer",
        attention_chunk_of_step="attention counts chunks from the first token of the step, not of the sequence",
        attention_sinks="attention leaves the sinks out of the denominator",
        attention_heads="attention shares key heads out in turns (h % K) instead of in groups",
        attention_blocks="attention reads the blocks that follow a sequence's first one, and not its block table",
        attention_nan="attention multiplies hidden values by zero, so NaN in memory nobody wrote gets through",
    )
    | _faults(
        "ops",
        {"core_register_ops": "states"},
        state_stale="layers with a state compute on a copy of it: the state in its slot stays as it was",
        state_neighbour="layers with a state read the slot of the step's next sequence",
        state_not_reset="layers with a state let a sequence begin on what its slot held",
        state_border="layers with a state leave the last token of a chunk out of the state that they keep",
    )
    | _faults(
        "fakes",
        {"core_register_fakes": "fakes"},
        process_wide=True,
        fake_shape="the shape rule of silu_and_mul keeps the whole last dimension",
        fake_dtype="the shape rule of silu_and_mul says float32 whatever the input",
        fake_strides="silu_and_mul returns columns next to each other, and its rule says rows",
        fake_alias="pad_rows returns its input where no row lacks, and its rule says new memory",
        fake_mutation="silu_and_mul leaves silu(gate) in its input, which its schema does not declare",
    )
    | _faults(
        "graphs",
        {"core_graph_backend": "graphs"},
        replay_stale_input="replays read a copy of the last input made at capture",
        replay_weights="replays read copies of the weights made at capture: an update in place is not seen",
        replay_noise="every second replay is off in the last bit",
        output_reused="the first output's memory is given to the last call of the graph too",
        output_moves="each replay returns its outputs at a new address",
        wrong_bucket="a replay runs another key's graph, one with equal output shapes if there is one",
        memory_kept="cleanup keeps the tapes and their memory",
        eager_replay="a replay calls the Python callable again",
        writes_twice="writes in place happen twice per replay",
        capture_writes="what a capture writes is not undone",
        recapture_ignored="capturing a key again gives the graph it had",
        update_ignored="an update of host-side arguments changes nothing",
        update_late="an update takes effect one replay later",
        uncaptured_replayed="can_run says yes to keys of a captured phase, and a replay takes the nearest graph",
        thread_mixed="results pass through one buffer of the process: replays on two threads mix them up",
        rng_advances="each capture draws from the host's random numbers",
    )
    | _faults(
        "graphs",
        {"core_graph_backend": "processes"},
        collective_lost="graphs hold no reductions between processes: each process goes on with its own part",
        collective_late="a collective in a graph gives the result of the replay before, from the fifth replay on",
        ranks_swapped="in graphs the parts of two processes are gathered in the wrong order",
        collective_twice="in graphs a sum over processes is made twice: each sum is summed again",
        collectives_exchanged="the second process replays two sums that follow each other in the other order",
        rank_left_out="in graphs the last process hands zeros in for its part of a sum",
        workspace_stale="sums in graphs are added up in memory that is cleared for the first four alone",
        gather_half="in graphs each process takes its own part for all parts of a gathered tensor",
        rank_eager="of several processes the second one calls Python again instead of replaying",
    )
    | _faults(
        "graphs",
        {"core_graph_backend": "graphs"},
        process_wide=True,
        failed_capture_sticks="after a failed capture the thread counts as recording until a cleanup",
    )
    | _faults(
        "graphs",
        {"core_graph_backend": "graphs", "core_open_device": "device"},
        late_landing="the last result of a replay lands when the device is synchronised or replays again",
    )
    | _faults(
        "graphs",
        {"core_open_device": "device"},
        memory_zero="the device says that no memory is in use",
    )
    | _faults(
        "models",
        {"core_graph_backend": "choices"},
        choice_stale="replays choose among many by the scores of the replay before, as an indexer would by stale keys",
        choice_off_by_one="in graphs the best of many is left out of a choice, and one more is taken behind the last",
    )
    | _faults(
        "passes",
        {"core_register_passes": "passes"},
        pass_never_fires="the soft cap pass finds nothing",
        pass_scale="the fused soft cap is 2 % off",
        pass_claims="the soft cap pass reports its matches and rewrites none",
        pass_greedy="the soft cap pass takes x / a and * b for one cap, whatever b is",
        pass_fourth="the soft cap pass gives matches from the fourth of a graph on a cap made from the first one's",
        pass_wide="the fused soft cap leaves columns from 8192 on uncapped",
        rank_passes="of several processes the second one runs its pass before those over collectives",
        pass_drops_write="the soft cap pass removes calls without users, and writes in place with them",
    )
    | _faults(
        "host",
        {"probe": "probing", "core_open_device": "device"},
        probe_lies="the probe counts one device more than there are, and that one does not open",
    )
    | _faults(
        "host",
        {"core_open_device": "device"},
        dtypes_lie="the device declares float8_e4m3fn, in which it cannot compute",
        error_vague="a device that is not there raises an IndexError",
    )
    | _faults(
        "ops",
        {"core_register_ops": "attention"},
        condition_lies="the condition of attention takes masks, on which the kernel raises",
    )
    | _faults(
        "torch",
        {"core_open_device": "device"},
        process_wide=True,
        torch_gelu="the device's own aten::gelu computes the tanh form for approximate='none'",
        torch_elsewhere="the device's own aten::rsub, of 1 - x, returns its result on another device",
        torch_strides="the device's own aten::tril returns columns next to each other, and torch rows",
    )
)
"""All planted faults by name."""


def check() -> None:
    """Raise `UsageError` where `ACME_FAULT` names no fault."""
    name = os.environ.get(VARIABLE, "")
    if name and name not in FAULTS:
        close = difflib.get_close_matches(name, FAULTS, n=1)
        suggestion = f"; did you mean {close[0]!r}?" if close else ""
        raise UsageError(
            f"{VARIABLE}={name!r}",
            found=f"no planted fault has that name; known: {', '.join(sorted(FAULTS))}{suggestion}",
            remedy=f"choose one of these, or unset {VARIABLE}",
        )


def planted(hook: str, honest: T) -> T:
    """Return what a hook is to give: the honest value, or the one that the fault in `ACME_FAULT` makes of it."""
    fault = FAULTS.get(os.environ.get(VARIABLE, ""))
    if fault is None or hook not in fault.hooks:
        return honest
    module = import_module(f"{__name__}.{fault.hooks[hook]}")
    spoil = getattr(module, fault.name.replace("-", "_"))
    spoiled: T = spoil(honest)
    return spoiled

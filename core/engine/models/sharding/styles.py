"""The styles of a plan: what is cut of a module or parameter, and what is done to inputs and results.

Names and meaning are those of transformers' `tp_plan` (transformers/distributed/tensor_parallel.py), and for experts
that are divided by their number those of its `ep_plan` (expert_parallel.py). Of the former the styles
"replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj" and "local_params" change nothing in inference here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from core.common.ops.collective.collectives import group_size
from core.common.ops.linear.weight_only import CODES_PER_WORD
from core.engine.models.sharding.cuts import Cut, rank_in
from core.engine.models.sharding.gathering import Gathering
from core.quantization.layers import CodedLinear, QuantizedModule
from core.quantization.parts import mark_part

Hook = Callable[[Tensor, str], Tensor]
CODES_OF = ("_scale", "_zero_point")
OF_INPUTS = ("input_", "hidden_")
"""Ends of the names of what codes need, and beginnings of those of what an input's codes need."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """What is done to a module or parameter that a line of a plan names."""

    #: The class of modules that it cuts; None for any, of which nothing is cut.
    module: type[nn.Module] | None = None
    #: From the last, the dimension of a weight or other parameter that is cut; None cuts nothing.
    from_last: int | None = None
    blocks: int = 1
    #: Turns the module's first input, or its result, into what goes on; given the group's name.
    before: Hook | None = None
    after: Hook | None = None
    #: Whether the parameter stays whole on the first process, and is zero elsewhere.
    first: bool = False
    #: Whether experts are divided by their number: a parameter is cut along its first dimension, and a module of
    #: experts computes those that it holds.
    numbered: bool = False

    def cut(self, name: str, parameter: Tensor) -> Cut | None:
        """Return how a parameter is cut; name: that of a module's parameter, "" for one that the plan names itself."""
        if self.first:
            return Cut(dim=None)
        if self.numbered:
            return None if self.sums or name.startswith(OF_INPUTS) else Cut(dim=0)
        if self.from_last is None:
            return None
        if name.endswith(CODES_OF) and (name.startswith(OF_INPUTS) or self._scales_rows(parameter)):
            return None
        if name == "bias":
            # Of a layer whose results are summed, the bias must be added once.
            return Cut(dim=0, blocks=self.blocks) if self.from_last == 2 else Cut(dim=None)
        return Cut(dim=max(parameter.ndim - self.from_last, 0), blocks=self.blocks)

    def _scales_rows(self, parameter: Tensor) -> bool:
        """Tell whether a parameter of codes has one number for a row, of which a process holds some columns."""
        return self.from_last == 1 and parameter.shape[-1] == 1

    def cuts(self, module: nn.Module) -> bool:
        """Tell whether the module is of the class that the style cuts, or the quantised form of one."""
        kind = (nn.Linear, CodedLinear) if self.module is nn.Linear else self.module
        return kind is None or isinstance(module, kind)

    @property
    def sums(self) -> bool:
        """Whether results of all processes are summed."""
        return self.after is _reduced

    def resize(self, module: nn.Module, num_processes: int) -> None:
        """Let a linear layer whose parameters have been cut say what it takes and gives."""
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        if isinstance(module, CodedLinear):
            module.out_features = module.weight.shape[0]
            module.in_features //= num_processes if self.from_last == 1 else 1
        if self.numbered and self.sums:
            module.num_experts //= num_processes  # type: ignore[operator,assignment]  # a number

    def apply(self, module: nn.Module, group: str) -> None:
        """Hook a module, whose parameters have been cut."""
        before, after = self.before, self.after
        if before is not None:
            module.register_forward_pre_hook(lambda _, inputs: (before(inputs[0], group), *inputs[1:]))
        if after is _gathered:
            gathering: Any = Gathering(group)
            module.gathering = gathering
            module.register_forward_hook(gathering)
        elif after is not None:
            module.register_forward_hook(lambda _module, _inputs, result: after(result, group))
        if self.sums:
            mark_part(module, group, has_rows=self.numbered)
        if self.numbered and self.sums:
            experts: Any = module
            # Of rows of experts elsewhere nothing is computed, and they hold anything: transformers clears them then.
            experts._is_expert_parallel = True
            module.register_forward_pre_hook(lambda experts, inputs: _own_experts(experts, inputs, group))
        self.resize(module, group_size(group))
        if isinstance(module, nn.Embedding):
            if self.from_last == 2:  # still an embedding of all tokens: `num_embeddings` stays
                module.__class__ = _part_of_vocabulary(type(module))
                part: Any = module
                part.group, part.rank = group, rank_in(group)
                module.padding_idx = None  # which matters to gradients alone, and must be one of the rows
            else:
                module.embedding_dim = module.weight.shape[1]


def names_of(owner: nn.Module, name: str) -> list[tuple[str, str]]:
    """Return the names of a parameter and of the scales and zero points of its codes, each with what `Style.cut` takes
    for it."""
    held = owner._parameters
    return [(name, ""), *((f"{name}{end}",) * 2 for end in CODES_OF if held.get(f"{name}{end}") is not None)]


def problem_of(owner: nn.Module, name: str, cut: Cut | None, num_processes: int) -> str:
    """Return why a number of processes can't have equal parts of a parameter, "" where they can."""
    if cut is None or cut.dim is None:
        return ""
    parameter: Tensor = getattr(owner, name)
    if isinstance(owner, QuantizedModule) and parameter.dtype == torch.int32 and cut.dim == parameter.ndim - 1:
        codes: Any = owner.in_features if isinstance(owner, CodedLinear) else owner.intermediate_dim
        if codes % CODES_PER_WORD:
            return f"holds {codes} codes in a row, which are no whole words of {CODES_PER_WORD}"
    if cut.divides(parameter.shape[cut.dim], num_processes):
        return ""
    blocks = f" in {cut.blocks} blocks" if cut.blocks > 1 else ""
    return f"has size {parameter.shape[cut.dim]}{blocks} where it is cut, which {num_processes} processes do not divide"


_PARTS: dict[type[nn.Embedding], type[nn.Embedding]] = {}


def _part_of_vocabulary(kind: type[nn.Embedding]) -> type[nn.Embedding]:
    """Return the class of an embedding that holds some of the rows: other tokens give zeros, and all are summed."""

    def forward(self: Any, input_ids: Tensor) -> Tensor:
        # Written so that the graphs of all processes have the same operations: passes must match alike.
        count = self.weight.shape[0]
        outside = input_ids // count != self.rank
        rows = kind.forward(self, input_ids % count)
        return _reduced(rows.masked_fill(outside.unsqueeze(-1), 0), self.group)

    if kind not in _PARTS:
        _PARTS[kind] = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return _PARTS[kind]


def _own_experts(experts: Any, inputs: tuple[Any, ...], group: str) -> tuple[Any, ...]:
    """Return the inputs of experts by the numbers that they have here, those elsewhere as transformers marks them: by
    the number after the last, with a weight of zero.

    inputs: hidden states, choices (T, k) and weights (T, k).
    """
    hidden_states, chosen, weights, *more = inputs
    count = experts.num_experts
    # Written so that the graphs of all processes have the same operations: passes must match alike.
    elsewhere = chosen // count != rank_in(group)
    own = (chosen % count).masked_fill(elsewhere, count)
    return hidden_states, own, weights.masked_fill(elsewhere, 0), *more


def _reduced(result: Tensor, group: str) -> Tensor:
    out: Tensor = torch.ops.core.all_reduce(result, group)
    return out


def _gathered(result: Tensor, group: str) -> Tensor:
    return Gathering(group).whole(result)


def _split(x: Tensor, group: str) -> Tensor:
    out: Tensor = torch.ops.core.local_shard(x, group, x.dim() - 1)
    return out


def _shared(x: Tensor, group: str) -> Tensor:
    """Return the part of x that, summed over the processes, is x."""
    return x / group_size(group)


_GATHERED = Style(module=nn.Linear, from_last=2, after=_gathered)
_SPLIT = Style(module=nn.Linear, from_last=1, before=_split, after=_reduced)
_SUMMED = Style(after=_reduced)
_WHOLE = Style()

STYLES: Mapping[str, Style] = MappingProxyType(
    {
        "colwise": Style(module=nn.Linear, from_last=2),
        "rowwise": Style(module=nn.Linear, from_last=1, after=_reduced),
        "rowwise_split_input": _SPLIT,
        "rowwise_rep": _SPLIT,
        "colwise_gather_output": _GATHERED,
        "colwise_rep": _GATHERED,
        "packed_colwise": Style(module=nn.Linear, from_last=2, blocks=2),
        "packed_rowwise": Style(module=nn.Linear, from_last=1, blocks=2),
        "embedding_rowwise": Style(module=nn.Embedding, from_last=2),
        "embedding_colwise": Style(module=nn.Embedding, from_last=1, after=_gathered),
        "moe_tp_experts": _SUMMED,
        "grouped_gemm": Style(numbered=True),
        "ep_dispatch_experts": Style(after=_reduced, numbered=True),
        "all_reduce": _SUMMED,
        "moe_identity_expert": Style(before=_shared),
        "on_first": Style(first=True),  # of `core` itself: a bias of experts whose results are summed
        **dict.fromkeys(("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params"), _WHOLE),
    }
)

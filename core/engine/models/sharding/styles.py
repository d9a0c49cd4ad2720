"""The styles of a plan: what is cut of a module or parameter, and what is done to inputs and results.

Names and meaning are those of transformers' `tp_plan` (transformers/distributed/tensor_parallel.py), whose styles
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
from core.engine.models.sharding.cuts import Cut, rank_in

Hook = Callable[[Tensor, str], Tensor]


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

    def cut(self, name: str, parameter: Tensor) -> Cut | None:
        """Return how a parameter is cut; name: that of a module's parameter, "" for one that the plan names itself."""
        if self.first:
            return Cut(dim=None)
        if self.from_last is None:
            return None
        if name == "bias":
            # Of a layer whose results are summed, the bias must be added once.
            return Cut(dim=0, blocks=self.blocks) if self.from_last == 2 else Cut(dim=None)
        return Cut(dim=max(parameter.ndim - self.from_last, 0), blocks=self.blocks)

    def apply(self, module: nn.Module, group: str) -> None:
        """Hook a module, whose parameters have been cut."""
        before, after = self.before, self.after
        if before is not None:
            module.register_forward_pre_hook(lambda _, inputs: (before(inputs[0], group), *inputs[1:]))
        if after is not None:
            module.register_forward_hook(lambda _module, _inputs, result: after(result, group))
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        if isinstance(module, nn.Embedding):
            if self.from_last == 2:  # still an embedding of all tokens: `num_embeddings` stays
                module.__class__ = _part_of_vocabulary(type(module))
                part: Any = module
                part.group, part.rank = group, rank_in(group)
                module.padding_idx = None  # which matters to gradients alone, and must be one of the rows
            else:
                module.embedding_dim = module.weight.shape[1]


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


def _reduced(result: Tensor, group: str) -> Tensor:
    out: Tensor = torch.ops.core.all_reduce(result, group)
    return out


def _gathered(result: Tensor, group: str) -> Tensor:
    out: Tensor = torch.ops.core.all_gather(result, group, result.dim() - 1)
    return out


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
        "all_reduce": _SUMMED,
        "moe_identity_expert": Style(before=_shared),
        "on_first": Style(first=True),  # of `core` itself: a bias of experts whose results are summed
        **dict.fromkeys(("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params"), _WHOLE),
    }
)

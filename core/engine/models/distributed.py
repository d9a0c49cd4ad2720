"""Running one model on several processes: joining what torchrun started, and sharding a model for tensor parallelism.

Processes, groups and backends are those of torch.distributed. A sharded model holds plain local tensors and calls the
canonical collectives (core/common/ops/collective/collectives.py) by their groups' names, so it traces whole, passes
see its collectives, and it runs as it is under `core.compile`, `core.capture` and the engine, on all processes in step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn

from core.common.ops.collective.collectives import group_size, local_shard, shared_group
from core.errors import UsageError

__all__ = ["Processes", "cut_parameters", "initialize", "plan_of", "shard_model"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Processes:
    """This process's place among the processes of a job."""

    rank: int
    #: Number of processes.
    size: int
    #: Its number among the processes of its host, which is the index of its device.
    local_rank: int


def initialize(backend: str | None = None, *, timeout_s: float = 600.0) -> Processes:
    """Join the default process group of the job that torchrun started, once, and return this process's place in it.

    backend: of torch.distributed ("gloo" on the host); None for torch's default for the devices at hand. timeout_s:
    after which a collective that others do not join is an error. A script that was started by itself is a job of one
    process, for which nothing is initialised; a group that was initialised before stays as it is. Raises `UsageError`
    if the group can't be made.
    """
    if not distributed.is_available():
        raise UsageError(
            "joining a process group", found="this torch has no torch.distributed", remedy="install one that has"
        )
    if not distributed.is_initialized():
        if not distributed.is_torchelastic_launched():
            return Processes(rank=0, size=1, local_rank=0)
        try:
            distributed.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        except (ValueError, RuntimeError) as error:
            raise UsageError(
                f"joining the process group of torchrun (backend {backend or 'by default'!r})",
                found=f"{type(error).__name__}: {error}",
                remedy="name a backend that this torch has, and look whether all processes still run",
            ) from error
    return Processes(
        rank=distributed.get_rank(),
        size=distributed.get_world_size(),
        local_rank=distributed.get_node_local_rank(fallback_rank=0),
    )


def shard_model(model: nn.Module, plan: Mapping[str, str] | None = None, *, group: str = "") -> nn.Module:
    """Cut the linear layers of a model among the processes of a group, in place, and return the model.

    plan: names of modules, `*` for a number, -> style; None takes transformers' `model.tp_plan`. Styles are
    transformers': "colwise" keeps a part of the results, "rowwise" takes a part of the inputs and reduces the results,
    "colwise_gather_output" (or "colwise_rep") gathers the parts of its results. Embeddings ("embedding_rowwise") and
    "replicate" styles stay whole. group: a process group's name, "" for the default one; with one process nothing is
    changed. Every process must hold the same whole model before, and a part of it after; quantise and compile it then.

    Raises `UsageError` for a style that is none of these, a plan that names no module, a module that is no
    `nn.Linear`, or sizes that the number of processes does not divide; the model is unchanged then.
    """
    asked = f"sharding {type(model).__name__} for tensor parallelism"
    plan = plan_of(model) if plan is None else plan
    num_processes = group_size(group)
    todo = [
        (module, f"{name} ({style})", _STYLES[style])
        for pattern, style in plan.items()
        for name, module in _named(asked, model, pattern, style)
    ]
    if num_processes == 1:
        return model
    _check_heads(asked, model, num_processes)
    for module, name, style in todo:
        if style is not None:
            _check_linear(asked, module, name, style, num_processes)
    with torch.no_grad():
        for module, _, style in todo:
            if style is not None:
                style.apply(module, group)
    return model


def plan_of(model: nn.Module) -> Mapping[str, str]:
    """Return transformers' own plan for a model; raise `UsageError` where it has none."""
    plan: Mapping[str, str] | None = getattr(model, "tp_plan", None)
    if not plan:
        raise UsageError(
            f"sharding {type(model).__name__} for tensor parallelism",
            found="it has no plan of its own",
            remedy="pass one: {'layers.*.up_proj': 'colwise', …}",
        )
    return plan


def cut_parameters(model: nn.Module, plan: Mapping[str, str]) -> dict[str, int | None]:
    """Return which parameters `shard_model` cuts, by name, with the dimension; None for those of rank 0 alone.

    Raises `UsageError` as it does for unknown styles and names.
    """
    asked = f"sharding {type(model).__name__} for tensor parallelism"
    found: dict[str, int | None] = {}
    names = {id(module): name for name, module in model.named_modules()}
    for pattern, kind in plan.items():
        style = _STYLES.get(kind)
        for _, module in _named(asked, model, pattern, kind):
            for each, _ in module.named_parameters(recurse=False) if style is not None else ():
                assert style is not None
                dim = style.dim if each == "weight" else (0 if style.dim == 0 else None)
                found[f"{names[id(module)]}.{each}"] = dim
    return found


@dataclass(frozen=True, slots=True)
class _Style:
    """How a linear layer is cut."""

    #: Dimension of the weight that is cut.
    dim: int
    #: Turns a part's result into what the model goes on with; None leaves it as it is.
    after: Callable[[Tensor, str], Tensor] | None = None

    def apply(self, module: nn.Module, group: str) -> None:
        weight, bias = module.weight, module.bias
        module.weight = _part(weight, group, self.dim)
        if isinstance(bias, nn.Parameter):
            module.bias = _part(bias, group, 0) if self.dim == 0 else _on_first(bias, group)
        for name, size in (("out_features", 0), ("in_features", 1)):
            setattr(module, name, module.weight.shape[size])
        if self.after is not None:
            after = self.after
            module.register_forward_hook(lambda _module, _inputs, result: after(result, group))


def _part(tensor: Any, group: str, dim: int) -> nn.Parameter:
    return nn.Parameter(local_shard(tensor, group, dim), requires_grad=tensor.requires_grad)


def _on_first(bias: nn.Parameter, group: str) -> nn.Parameter:
    """Return the bias that a process adds before the sum: all of it on the first process, none elsewhere."""
    found = shared_group(group)
    return (
        bias
        if found is None or found.rank() == 0
        else nn.Parameter(torch.zeros_like(bias), requires_grad=bias.requires_grad)
    )


def _reduced(result: Tensor, group: str) -> Tensor:
    out: Tensor = torch.ops.core.all_reduce(result, group)
    return out


def _gathered(result: Tensor, group: str) -> Tensor:
    out: Tensor = torch.ops.core.all_gather(result, group, result.dim() - 1)
    return out


_STYLES: Mapping[str, _Style | None] = {
    "colwise": _Style(0),
    "rowwise": _Style(1, _reduced),
    "colwise_gather_output": _Style(0, _gathered),
    "colwise_rep": _Style(0, _gathered),
    "embedding_rowwise": None,
    "embedding_colwise": None,
    "replicate": None,
    "replicated_with_grad_allreduce": None,
}
"""Style -> what is done to a linear layer; None for modules that every process keeps whole."""


def _named(asked: str, model: nn.Module, pattern: str, style: str) -> list[tuple[str, nn.Module]]:
    """Return the modules that a line of a plan names."""
    if style not in _STYLES:
        raise UsageError(
            asked,
            found=f"style {style!r} for {pattern!r}; known are: {', '.join(sorted(_STYLES))}",
            remedy="pass a plan of known styles; a module that it leaves out stays whole on every process",
        )
    wanted = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    found = [(name, module) for name, module in model.named_modules() if wanted.fullmatch(name)]
    if not found:
        raise UsageError(
            asked,
            found=f"no module is named {pattern!r}",
            remedy="name modules of this model, `*` for a number, as in 'model.layers.*.mlp.up_proj'",
        )
    return found


def _check_heads(asked: str, model: nn.Module, num_processes: int) -> None:
    """Refuse numbers of heads that can't be cut: a part of a head would be silently taken for one."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, name, None)
        if isinstance(count, int) and count % num_processes:
            raise UsageError(
                asked,
                found=f"{name} is {count}, which {num_processes} processes do not divide",
                remedy="run fewer processes, or pass a plan for a group of fewer",
            )


def _check_linear(asked: str, module: nn.Module, name: str, style: _Style, num_processes: int) -> None:
    if not isinstance(module, nn.Linear):
        raise UsageError(
            asked,
            found=f"{name} is a {type(module).__name__}, only nn.Linear can be cut",
            remedy="shard before quantising; or leave it out of the plan, and it stays whole",
        )
    size = module.weight.shape[style.dim]
    if size % num_processes:
        raise UsageError(
            asked,
            found=f"{name} has size {size} where it is cut, which {num_processes} processes do not divide",
            remedy="run a number of processes that divides it, or leave the module out of the plan",
        )

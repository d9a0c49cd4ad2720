"""Cuts a model in place, by a plan. A sharded model holds plain local tensors and calls the canonical collectives
(core/common/ops/collective/collectives.py) by their groups' names, so it traces whole, passes see its collectives, and
it runs as it is under `core.compile`, `core.capture` and the engine, on all processes in step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from core.common.ops.collective.collectives import group_size
from core.engine.models.sharding.cuts import Cut, rank_in
from core.engine.models.sharding.lines import pattern
from core.engine.models.sharding.plan import plan_of, spares_attention
from core.engine.models.sharding.styles import STYLES, Style, names_of, problem_of
from core.errors import UsageError

_KEYS = ("k_proj", "v_proj")


def shard_model(model: nn.Module, plan: Mapping[str, str] | None = None, *, group: str = "") -> nn.Module:
    """Cut a model among the processes of a group, in place, and return it.

    plan: names of modules or parameters, `*` for a number, -> style (styles.py); None takes transformers'
    `model.tp_plan`, completed by plan.py. group: a process group's name, "" for the default one; with one process
    nothing is changed. Every process must hold the same whole model before, and a part of it after; compile it then.
    Layers may be quantised before or after: all processes together have the same codes either way. Where there are
    fewer key heads than processes, some processes hold the same ones.

    Raises `UsageError` for an unknown style, a plan that names nothing, a module that its style can't cut, or sizes
    that the number of processes does not divide; the model is unchanged then.
    """
    count, rank = group_size(group), rank_in(group)
    plan = plan_of(model, count) if plan is None else plan
    todo = _Todo.of(model, plan, count)
    if count == 1:
        return model
    todo.check()
    new: dict[int, nn.Parameter] = {}  # a weight that two modules share is cut once, and shared on
    with torch.no_grad():
        for owner, name, cut in todo.parameters:
            old = getattr(owner, name)
            if id(old) not in new:
                new[id(old)] = nn.Parameter(cut.of(old, rank, count), requires_grad=old.requires_grad)
            setattr(owner, name, new[id(old)])
        for module, style in todo.modules:
            style.apply(module, group)
    for module in todo.grouped:
        queries, keys = (getattr(module, name).out_features for name in ("q_proj", "k_proj"))
        module.num_key_value_groups = queries // keys
    return model


def cut_parameters(model: nn.Module, plan: Mapping[str, str], num_processes: int) -> dict[str, Cut]:
    """Return how `shard_model` cuts parameters, by name; raise `UsageError` as it does for unknown styles and names."""
    names = {id(module): name for name, module in model.named_modules()}
    todo = _Todo.of(model, plan, num_processes)
    return {f"{names[id(owner)]}.{name}": cut for owner, name, cut in todo.parameters}


def cut_modules(
    model: nn.Module, plan: Mapping[str, str], num_processes: int, wanted: Callable[[nn.Module], bool]
) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Yield each wanted module whose results processes sum up, with the parts of all processes, by rank.

    The parts have no hooks. Raises `UsageError` as `shard_model` does.
    """
    if num_processes == 1:
        return
    todo = _Todo.of(model, plan, num_processes)
    todo.check()
    for module, style in todo.modules:
        if style.sums and not style.numbered and wanted(module):
            parts = [copy.deepcopy(module) for _ in range(num_processes)]
            for owner, name, cut in todo.parameters:
                if owner is module:
                    for rank, part in enumerate(parts):
                        held = cut.of(getattr(owner, name), rank, num_processes)
                        setattr(part, name, nn.Parameter(held, requires_grad=False))
            for part in parts:
                style.resize(part, num_processes)
            yield module, parts


@dataclass(frozen=True, kw_only=True, slots=True)
class _Todo:
    """What a plan means for a model."""

    model: nn.Module
    count: int
    #: A module, the name of a parameter of its own, and how that is cut.
    parameters: list[tuple[nn.Module, str, Cut]]
    modules: list[tuple[nn.Module, Style]]
    #: Attention modules that have to know how many heads of queries a key head has now.
    grouped: list[Any]
    #: What can't be done, for the error.
    problems: list[str]
    #: Whether it may cut attention; a plan that was read off a graph never does.
    cuts_heads: bool

    @staticmethod
    def of(model: nn.Module, plan: Mapping[str, str], count: int) -> _Todo:
        cuts_heads = not spares_attention(model, plan)
        todo = _Todo(
            model=model, count=count, parameters=[], modules=[], grouped=[], problems=[], cuts_heads=cuts_heads
        )
        modules, parameters = dict(model.named_modules()), dict(model.named_parameters(remove_duplicate=False))
        for line, kind in plan.items():
            if kind not in STYLES:
                raise UsageError(
                    _asked(model),
                    found=f"style {kind!r} for {line!r}; known are: {', '.join(sorted(STYLES))}",
                    remedy="pass a plan of known styles; a module that it leaves out stays whole on every process",
                )
            wanted, style = pattern(line), STYLES[kind]
            found = [name for name in (*modules, *parameters) if wanted.fullmatch(name)]
            for name in found:
                if name in modules:
                    todo._module(f"{name} ({kind})", modules[name], style, modules.get(name.rpartition(".")[0]))
                else:
                    owner, _, own = name.rpartition(".")
                    for each, key in names_of(modules[owner], own):
                        cut = style.cut(key, getattr(modules[owner], each))
                        todo._parameter(f"{owner}.{each} ({kind})", modules[owner], each, cut)
            if not found:
                raise UsageError(
                    _asked(model),
                    found=f"no module is named {line!r}, and no parameter",
                    remedy="name modules of this model, `*` for a number, as in 'model.layers.*.mlp.up_proj'",
                )
        return todo

    def check(self) -> None:
        """Raise `UsageError` for what can't be cut."""
        problems = [*(self._heads() if self.cuts_heads else ()), *self.problems]
        if problems:
            raise UsageError(
                _asked(self.model),
                found=problems[0],
                remedy="run a number of processes that divides it; in a script, a plan may leave the module whole",
            )

    def _module(self, name: str, module: nn.Module, style: Style, parent: Any) -> None:
        if style.module is not None and not style.cuts(module):
            kind, wanted = type(module).__name__, style.module.__name__
            self.problems.append(f"{name} is a {kind}, and the style cuts nn.{wanted}")
            return
        copies = self._copies(name, parent)
        if copies > 1 and parent not in self.grouped:
            self.grouped.append(parent)
        for own, parameter in module.named_parameters(recurse=False):
            cut = style.cut(own, parameter)
            self._parameter(name, module, own, cut if cut is None else replace(cut, copies=copies))
        self.modules.append((module, style))

    def _parameter(self, name: str, owner: nn.Module, own: str, cut: Cut | None) -> None:
        if cut is None:
            return
        if problem := problem_of(owner, own, cut, self.count):
            self.problems.append(f"{name} {problem}")
        self.parameters.append((owner, own, cut))

    def _copies(self, name: str, parent: Any) -> int:
        """Return how many processes hold the same key heads, for a projection of keys or values."""
        heads = getattr(_config(self.model), "num_key_value_heads", None)
        is_keys = name.partition(" ")[0].rpartition(".")[2] in _KEYS and hasattr(parent, "num_key_value_groups")
        return self.count // heads if is_keys and isinstance(heads, int) and 0 < heads < self.count else 1

    def _heads(self) -> list[str]:
        """Return numbers of heads that can't be cut: a part of a head would be silently taken for one."""
        config = _config(self.model)
        counts = [(name, getattr(config, name, None)) for name in ("num_attention_heads", "num_key_value_heads")]
        shared = bool(self.grouped)
        return [
            f"{name} is {count}, which {self.count} processes do not divide"
            for name, count in counts
            if isinstance(count, int)
            and count % self.count
            and not (shared and name == "num_key_value_heads" and self.count % count == 0)
        ]


def _config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _asked(model: nn.Module) -> str:
    return f"sharding {type(model).__name__} for tensor parallelism"

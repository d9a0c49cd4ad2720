"""Which parts of a model are cut, and how: transformers' plan, completed where it says nothing.

A plan maps names of modules or parameters, `*` for a number, to styles (styles.py). transformers' plans leave out the
embedding, experts of some models, and attention of a few; these are found by what modules hold, not by names of models:

- the embedding of the tokens, by rows, and a head that shares its weight;
- modules of experts that say how their weights are laid out (transformers' `use_experts_implementation`), by width,
  or by their number where that is asked for or where the width can't be divided;
- attention whose projections have the usual names, and nothing but these, `sinks` and norms of a head.

Where all this cuts no layer, the plan is read off the model's graph (derived.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from core.engine.models.sharding.derived import derived
from core.engine.models.sharding.lines import line_of, pattern
from core.engine.models.sharding.styles import CODES_OF, STYLES, names_of, problem_of
from core.errors import UsageError
from core.quantization.layers import CodedLinear

ExpertCut = Literal["width", "number"]
"""What of the experts a process holds: some columns of each, or some of them."""
_OF_VOCABULARIES = ("embedding_rowwise", "embedding_colwise", "colwise_gather_output", "colwise_rep")
_PROJECTIONS = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The plan for a model on a number of processes."""

    #: Name, `*` for a number -> style.
    plan: Mapping[str, str]
    #: Of these, the names that transformers' plan does not have.
    added: frozenset[str] = frozenset()
    #: Name -> why it stays whole although it could be cut elsewhere.
    whole: Mapping[str, str] = field(default_factory=dict)

    def facts(self) -> dict[str, str]:
        """Return what `core explain` says of it: the lines of each style, and what stays whole."""
        styles: dict[str, list[str]] = {}
        for line, style in self.plan.items():
            styles.setdefault(style, []).append(f"{line} (added)" if line in self.added else line)
        cut = "; ".join(f"{style}: {', '.join(lines)}" for style, lines in styles.items())
        whole = "; ".join(f"{name}: {reason}" for name, reason in self.whole.items())
        return {"cut": cut} | ({"whole": whole} if whole else {})


def plan_of(model: nn.Module, num_processes: int, experts: ExpertCut = "width") -> Mapping[str, str]:
    """Return the plan of `planned`; raise `UsageError` where there is none."""
    plan = planned(model, num_processes, experts).plan
    if not _cuts_layers(plan):
        reason = derived(model)[1]
        graph = f"can't be read: {reason}" if reason else "shows no products that can be cut together"
        raise UsageError(
            f"sharding {type(model).__name__} for tensor parallelism",
            found=f"it has no plan of its own, and its graph {graph}",
            remedy="run it on one rank, or in a script give shard_model a plan: {'layers.*.up_proj': 'colwise', …}",
        )
    return plan


def _cuts_layers(plan: Mapping[str, str]) -> bool:
    """Tell whether a plan cuts more than a vocabulary, of which alone nothing is gained."""
    styles = {style for style in plan.values() if style in STYLES and style not in _OF_VOCABULARIES}
    return any(STYLES[style].from_last or STYLES[style].numbered for style in styles)


def planned(model: nn.Module, num_processes: int, experts: ExpertCut = "width") -> Planned:
    """Return how a model is cut for a number of processes. Embeddings and heads whose vocabulary they do not divide
    stay whole.

    experts: "width" gives each process some columns of every expert, where all experts can be cut so; "number" some of
    the experts. transformers' plan for experts that do not say how they are laid out stays as it is.
    """
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    given: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    # A plan is for a family: some lines name what this model lacks, as dense layers where all have experts.
    plan = {line: style for line, style in given.items() if any(map(pattern(line).fullmatch, names))}
    modules = dict(model.named_modules())
    added: dict[str, str] = {}
    for name, module in modules.items():
        for part, style in (*_experts(module), *_attention(module)):
            added.setdefault(line_of(f"{name}.{part}" if part else name), style)
    owners = {line.rpartition(".")[0] for line in plan}
    # A module that the plan knows is the plan's: nothing is added beside its own lines.
    extra = {line: style for line, style in added.items() if line not in plan and not _known(line, plan, owners)}
    plan, extra = _by_number(modules, plan, extra, num_processes, experts)
    if not _cuts_layers({**plan, **extra}):
        extra |= {line: style for line, style in derived(model)[0].items() if any(map(pattern(line).fullmatch, names))}
    vocabulary, whole = _vocabulary(model, plan, num_processes)
    plan = {line: style for line, style in plan.items() if line not in whole}
    return Planned(plan={**plan, **extra, **vocabulary}, added=frozenset((*extra, *vocabulary)), whole=whole)


def spares_attention(model: Any, plan: Mapping[str, str]) -> bool:
    """Tell whether a plan was read off a graph, so that it cuts no heads."""
    lines = {line for line, style in plan.items() if style not in _OF_VOCABULARIES}
    return not getattr(model, "tp_plan", None) and bool(lines) and lines <= derived(model)[0].keys()


def _known(line: str, plan: Mapping[str, str], owners: set[str]) -> bool:
    """Tell whether the plan has lines for the module that a line, or the parameter of a line, belongs to."""
    owner = line.rpartition(".")[0]
    return owner in plan or owner in owners or (line in owners)


def _experts(module: Any) -> Iterator[tuple[str, str]]:
    """Yield the lines for a module of experts, each of which every process holds some columns of."""
    laid_out = (getattr(module, name, None) for name in ("is_transposed", "is_concatenated"))
    held = {name: each for name, each in module.named_parameters(recurse=False) if not name.endswith(CODES_OF)}
    gated = "gate_up_proj" in held
    weights = ("gate_up_proj" if gated else "up_proj", "down_proj")
    if None in laid_out or held.keys() - {*weights, *(f"{name}_bias" for name in weights)}:
        return
    if not held.keys() >= {*weights} or any(held[name].ndim != 3 for name in weights):
        return
    # Without a gate there is one block; gate and up that alternate are cut into parts of whole pairs.
    packed = "packed_" if gated and module.is_concatenated else ""
    across, along = ("rowwise", "colwise") if module.is_transposed else ("colwise", "rowwise")
    yield weights[0], f"{packed}{across}"
    yield "down_proj", along
    if f"{weights[0]}_bias" in held:
        yield f"{weights[0]}_bias", f"{packed}rowwise"
    if "down_proj_bias" in held:
        yield "down_proj_bias", "on_first"
    yield "", "moe_tp_experts"


def _by_number(
    modules: Mapping[str, Any], plan: dict[str, str], extra: dict[str, str], num_processes: int, experts: ExpertCut
) -> tuple[dict[str, str], dict[str, str]]:
    """Return both plans with experts that are divided by their number, where they have to be or shall be."""
    for name, module in modules.items():
        by_width = dict(_experts(module))
        line = line_of(name)
        if not by_width or line not in {**plan, **extra}:
            continue
        if experts == "width" and _divided(module, by_width, num_processes):
            continue
        lines = {line, *(f"{line}.{part}" for part in by_width if part)}
        plan, extra = ({key: style for key, style in each.items() if key not in lines} for each in (plan, extra))
        extra |= {f"{line}.{part}": "grouped_gemm" for part in by_width if part} | {line: "ep_dispatch_experts"}
    return plan, extra


def _divided(module: nn.Module, lines: Mapping[str, str], num_processes: int) -> bool:
    """Tell whether a number of processes divides what these lines cut of a module, scales of codes included."""
    return not any(
        problem_of(module, own, STYLES[style].cut(key, getattr(module, own)), num_processes)
        for part, style in lines.items()
        if part
        for own, key in names_of(module, part)
    )


def _attention(module: Any) -> Iterator[tuple[str, str]]:
    """Yield the lines for attention, each process of which has some of the heads."""
    layers = dict(module.named_children())
    if not all(isinstance(layers.get(name), (nn.Linear, CodedLinear)) for name in _PROJECTIONS):
        return
    size = getattr(module, "head_dim", None)
    if type(size) is not int or not hasattr(module, "num_key_value_groups"):
        return
    num_heads = layers["q_proj"].out_features // size
    for name, parameter in module.named_parameters():
        first, _, rest = name.partition(".")
        is_sinks = name == "sinks" and tuple(parameter.shape) == (num_heads,)
        if not is_sinks and first not in _PROJECTIONS and (not rest or tuple(parameter.shape) != (size,)):
            return
    yield from _PROJECTIONS.items()
    if isinstance(getattr(module, "sinks", None), nn.Parameter):
        yield "sinks", "colwise"


def _vocabulary(model: Any, plan: Mapping[str, str], num_processes: int) -> tuple[dict[str, str], dict[str, str]]:
    """Return lines for the embedding and the head, and those of the plan that can't be cut, with the reason."""
    names = {id(module): name for name, module in model.named_modules()}
    found = [getattr(model, f"get_{kind}_embeddings", lambda: None)() for kind in ("input", "output")]
    embedding, head = (module if id(module) in names else None for module in found)
    added: dict[str, str] = {}
    whole: dict[str, str] = {}
    for module, kind, style in (
        (embedding, nn.Embedding, "embedding_rowwise"),
        (head, (nn.Linear, CodedLinear), "colwise_gather_output"),
    ):
        if not isinstance(module, kind):
            continue
        name = names[id(module)]
        size = module.weight.shape[0]
        if size % num_processes:
            whole[name] = f"{size} rows, which {num_processes} processes do not divide"
        elif name not in plan and (module is embedding or module.weight is getattr(embedding, "weight", None)):
            added[name] = style
    return added, whole

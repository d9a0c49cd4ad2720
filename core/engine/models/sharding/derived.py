"""A plan for models that transformers has none for, read off their graph.

Where each feature that a product reads is computed from the same feature of other products alone, those may be cut
along their results and this one along its inputs, and one sum joins the parts: an MLP's, as in Megatron-LM (Shoeybi et
al. 2019, arXiv:1909.08053, section 3). Attention stays whole: its code counts heads by numbers of its own.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from core.common.node_meta import value_of
from core.common.passes import view
from core.engine.models.sharding.lines import line_of, pattern
from core.errors import one_line

_NUM_TOKENS, _NUM_LAYERS = 8, 2
_known: dict[tuple[type, str], tuple[Mapping[str, str], str]] = {}


def derived(model: Any) -> tuple[Mapping[str, str], str]:
    """Return lines -> style for a model of transformers, and why its graph can't be read, "" where it was.

    Read once for each class and configuration, off a model of its first layers without weights, as many as show each
    kind of layer that its configuration names.
    """
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "to_json_string", None)):
        return {}, "it has no configuration of transformers"
    key = (type(model), str(config.to_json_string()))
    if key not in _known:
        try:
            _known[key] = lines_in(_short(model)), ""
        except Exception as error:  # whatever code of a model raises
            _known[key] = {}, f"{type(error).__name__}: {one_line(str(error))}"
    return _known[key]


def _short(model: Any) -> Any:
    try:
        config = _shortened(model.config)
    except (AttributeError, NotImplementedError):  # some say their number of layers otherwise: all are read then
        config = copy.deepcopy(model.config)
    with torch.device("meta"):
        made = type(model)(config).eval()
    # Nothing writes there, so the kernel gives no memory; code of models mixes constants of the host with `meta`.
    return made.to_empty(device="cpu")


def _shortened(config: Any) -> Any:
    config = copy.deepcopy(config)
    text = config.get_text_config()
    kinds = list(getattr(text, "layer_types", None) or ())
    count = max((kinds.index(kind) + 1 for kind in kinds), default=_NUM_LAYERS)
    text.num_hidden_layers = min(max(count, _NUM_LAYERS), text.num_hidden_layers)
    if kinds:
        text.layer_types = kinds[: text.num_hidden_layers]
    return config


def lines_in(model: nn.Module) -> Mapping[str, str]:
    """Return lines -> style, read off the graph of a model that takes `input_ids` and returns `logits`.

    A line is for all layers or for none: what only some of them allow is left out, with its whole group of products.
    Raises `TraceError`.
    """
    products = _products(model)
    groups = [(name, sources) for node, name in products.items() if (sources := _sources(node, products))]
    styles = {each: "colwise" for _, sources in groups for each in sources} | {name: "rowwise" for name, _ in groups}
    names = [name for name, _ in model.named_modules()]
    found: dict[str, str] = {}
    for name, sources in groups:
        lines = {line_of(each): styles[each] for each in (name, *sources)}
        alike = ((each, style) for line, style in lines.items() for each in filter(pattern(line).fullmatch, names))
        if all(styles.get(each) == style for each, style in alike):
            found |= lines
    return found


def _products(model: Any) -> dict[fx.Node, str]:
    """Return the products of a model's graph, each with the name of the only linear layer that it is of."""
    from core.common.passes.standard import COMMON_PASSES
    from core.compilation.rewrite.manager import PassManager
    from core.compilation.trace.tracing import trace

    def logits(input_ids: Tensor) -> dict[str, Tensor]:
        return {"logits": model(input_ids=input_ids, use_cache=False).logits}

    traced = trace(logits, {"input_ids": torch.arange(2 * _NUM_TOKENS).view(2, -1) + 1})
    PassManager(COMMON_PASSES, only=("remove_no_ops",)).run(traced.module)  # dropout and the like
    owners = {id(each.weight): name for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    inputs = traced.module.graph.find_nodes(op="placeholder")
    held = {node: owners.get(id(getattr(slot, "value", None))) for node, slot in zip(inputs, traced.slots, strict=True)}
    found: dict[fx.Node, str] = {}
    for node in traced.module.graph.nodes:
        name = held.get(_weight(node))
        if name is not None:
            found[node] = name
    return found


def _weight(node: fx.Node) -> Any:
    """Return the weight of a product, None for other nodes and for a weight that others read, too."""
    weight: Any = view.operand(node, 1, "weight") if view.kind(node) in ("linear", "matmul") else None
    if view.kind(node) == "matmul":  # some layers write out what F.linear does
        is_turned = isinstance(weight, fx.Node) and weight.target is getattr and weight.args[1] in ("T", "mT")
        weight = weight.args[0] if is_turned and len(weight.users) == 1 else None
    return weight if isinstance(weight, fx.Node) and len(weight.users) == 1 else None


def _sources(product: fx.Node, products: Mapping[fx.Node, str]) -> list[str]:
    """Return the layers whose results are, feature by feature, all that a product reads; nothing where more is read, or
    where anything else reads what comes between."""
    features = view.operand(product, 0, "input")
    width = _width(features)
    between, sources, waiting = set[fx.Node](), dict[fx.Node, str](), [features]
    while waiting:
        node = waiting.pop()
        if node in between:
            continue
        between.add(node)
        if node in products:
            sources[node] = products[node]
        elif not _is_pointwise(node):
            return []
        else:
            waiting += [each for each in node.all_input_nodes if _width(each) != 1]
        if _width(node) != width:
            return []
    inside = {*between, product}
    return list(sources.values()) if all(user in inside for node in between for user in node.users) else []


def _width(node: Any) -> int:
    """Return the number of features of a value, 1 for what is the same for all."""
    value = value_of(node) if isinstance(node, fx.Node) else None
    return int(value.shape[-1]) if isinstance(value, Tensor) and value.dim() else 1


@functools.lru_cache(maxsize=256)
def _tagged(kind: str) -> bool:
    packet = getattr(torch.ops.aten, kind, None)
    names = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ()
    return any(torch.Tag.pointwise in getattr(packet, name).tags for name in names)


def _is_pointwise(node: fx.Node) -> bool:
    """Tell whether each element of a result is computed from those at its place alone, as torch's tags say."""
    kind = view.kind(node)
    return kind == "cast" or (kind != "" and _tagged(kind))

"""The seam between transformers' models and `core::attention`: its attention and mask interfaces, nothing patched.

A model is first *inspected*: one short eager run with recording interfaces tells which modules attend, with what heads,
scale, window and mask. If every one of them can be served by the paged op, the model is *served* through the attention
interface alone: without a registered mask function transformers builds no mask, and the op rebuilds it from positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from threading import local
from typing import Any

import torch
from torch import Tensor, nn

import core.common.ops.attention.paged  # noqa: F401  # registers core::attention
from core.common.graphs.indexing import checked_indices
from core.compilation.capture.breaks import Held
from core.engine.inspect.masks import Reach, prove_causal
from core.errors import UsageError

SERVE = "core"
INSPECT = "core_inspect"
SIZE = "core_size"
_STATE = "_core_attention"
# Arguments of the attention interface that carry no arithmetic of their own, or are handled by name below.
_UNDERSTOOD = {"dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "indices"}
_IRRELEVANT = {"position_ids", "use_cache", "output_attentions", "output_router_logits", "cache_position"}


class NotPageable(Exception):
    """The model can't run on the paged cache; the text is the reason, for the report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionLayer:
    """What one attention module needs of the cache."""

    #: Path of the module in the model.
    path: str
    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    reach: Reach
    dtype: torch.dtype
    #: Whether the call says which positions a token sees.
    indexed: bool = False

    @property
    def bytes_per_position(self) -> int:
        """Cache memory of one position, key and value."""
        return self.num_kv_heads * (self.key_size + self.value_size) * self.dtype.itemsize


@dataclass(slots=True)
class StepTensors:
    """The tensors of the step being run, set around each model call; see `core::attention` for shapes."""

    block_table: Tensor | None = None
    slot_mapping: Tensor | None = None
    seq_lens: Tensor | None = None
    query_starts: Tensor | None = None
    max_query_len: int = 0

    @property
    def held(self) -> tuple[Held, ...]:
        """What is set for the time of a step: all of it."""
        return tuple((self, each.name) for each in fields(self))

    def clear(self) -> None:
        """Forget the step."""
        self.block_table = self.slot_mapping = self.seq_lens = self.query_starts = None
        self.max_query_len = 0  # restored before the trace ends: state that a forward changes is refused


@dataclass(slots=True, eq=False)
class LayerState:
    """The state that the attention function reads from its module."""

    key_cache: Tensor
    value_cache: Tensor
    reach: Reach
    #: The step being run, shared by all layers.
    step: StepTensors
    #: The scales of codes in the cache.
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def __deepcopy__(self, memo: object) -> LayerState:
        """Stay with the original: a copied model must not duplicate the cache."""
        return self


@dataclass(slots=True)
class _Recording:
    max_len: int
    masks: dict[int, tuple[Reach | None, str]] = field(default_factory=dict)
    kept: list[Tensor] = field(default_factory=list)
    layers: dict[nn.Module, AttentionLayer] = field(default_factory=dict)
    paths: Mapping[nn.Module, str] = field(default_factory=dict)


_recording = local()


def register_interfaces() -> None:
    """Make both implementations known to transformers; calling it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(SERVE, serve_attention)
    AttentionInterface.register(INSPECT, _inspect_attention)
    AttentionInterface.register(SIZE, _size_attention)
    AttentionMaskInterface.register(INSPECT, _inspect_mask)


@contextmanager
def implementation(model: Any, name: str) -> Iterator[None]:
    """Run a block with the model's attention implementation set to `name`; raise `NotPageable` if it can't be set."""
    before = model.config._attn_implementation
    set_implementation(model, name)
    try:
        yield
    finally:
        set_implementation(model, before)


def set_implementation(model: Any, name: str) -> None:
    """Set the model's attention implementation; raise `NotPageable` where its code does not use the interface."""
    if model.config._attn_implementation == name:
        return
    if not model._can_set_attn_implementation():
        raise NotPageable(f"{type(model).__name__} does not call transformers' attention interface")
    model.set_attn_implementation(name)


@checked_indices()
def inspect(model: Any, *, max_len: int, num_tokens: int = 8, required: bool = True) -> dict[nn.Module, AttentionLayer]:
    """Run the model once on a few tokens and return its attention layers in order of execution.

    max_len: the longest context that will occur; masks are proven up to there. required: whether there must be any.
    Raises `NotPageable` with the reason.
    """
    register_interfaces()
    positions = torch.arange(min(num_tokens, max_len), device=next(model.parameters()).device)[None]
    tokens = positions % model.config.get_text_config().vocab_size
    recording = _recording.current = _Recording(max_len, paths={module: path for path, module in model.named_modules()})
    try:
        with torch.no_grad(), implementation(model, INSPECT):
            model(input_ids=tokens, position_ids=positions, use_cache=False)
    except NotPageable:
        raise
    except Exception as error:
        raise NotPageable(f"its forward fails without a cache: {type(error).__name__}: {error}") from error
    finally:
        _recording.current = None
    if required and not recording.layers:
        raise NotPageable(f"{type(model).__name__} ran without calling transformers' attention interface")
    return recording.layers


def _inspect_mask(mask_function: Any, q_length: int, kv_length: int, device: Any = "cpu", **_: Any) -> Tensor:
    """Replaces the mask function: proves the mask, and returns a marker that the layers pass on to attention."""
    recording: _Recording = _recording.current
    marker = torch.zeros((1, 1, q_length, kv_length), dtype=torch.bool, device=device)
    recording.masks[id(marker)] = prove_causal(mask_function, recording.max_len, device)
    recording.kept.append(marker)  # keeps the id from being given to another tensor
    return marker


def _inspect_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    recording: _Recording = _recording.current
    path = recording.paths.get(module, type(module).__name__)
    if module in recording.layers:
        raise NotPageable(f"{path} attends more than once per step")
    recording.layers[module] = AttentionLayer(
        path=path,
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        key_size=key.shape[3],
        value_size=value.shape[3],
        reach=_reach(path, recording, attention_mask, options),
        dtype=key.dtype,
        indexed=options.get("indices") is not None,
    )
    _check_call(path, query, key, options)
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _size_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    """Replaces attention when only the memory of a forward is measured: a kernel allocates little besides its
    output."""
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _reach(path: str, recording: _Recording, mask: Tensor | None, options: Mapping[str, Any]) -> Reach:
    if mask is None or id(mask) not in recording.masks:
        raise NotPageable(f"{path} gets a mask that was not made by transformers' mask functions")
    reach, reason = recording.masks[id(mask)]
    if reach is None:
        raise NotPageable(f"the mask of {path} is not proven: {reason}")
    stated = options.get("sliding_window") or 0
    if stated and stated < recording.max_len and Reach(stated) != reach:
        raise NotPageable(f"{path} states a window of {stated}, and its mask is {reach}")
    return reach


def _check_call(path: str, query: Tensor, key: Tensor, options: Mapping[str, Any]) -> None:
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise NotPageable(
            f"{path} attends from {tuple(query.shape)} to {tuple(key.shape)}: not self-attention by token"
        )
    if options.get("dropout"):
        raise NotPageable(f"{path} drops attention weights at inference")
    chosen = options.get("indices")
    if chosen is not None and (chosen.shape[:-1] != (1, query.shape[2]) or chosen.is_floating_point()):
        raise NotPageable(f"{path} passes 'indices' of {tuple(chosen.shape)}, not some positions for each token")
    for name, value in options.items():
        if name not in _UNDERSTOOD | _IRRELEVANT and isinstance(value, Tensor):
            raise NotPageable(f"{path} passes {name!r}, which the paged op does not know")


def serve_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend through `core::attention`. query (1, H, T, D), key and value (1, K, T, ·) -> (1, T, H, V).

    indices: the positions of its sequence that each token sees, as far as they come no later, (…, T, any number).

    Only reached on models that passed `inspect`, whose mask is part of the layer's state.
    """
    state: LayerState | None = getattr(module, _STATE, None)
    if state is None or state.step.block_table is None:
        raise UsageError(
            f"a call of the model around {type(module).__name__}",
            found="an engine serves it, and none of its steps is running",
            remedy="generate with the engine, or close it first",
        )
    step, mask = state.step, None
    if indices is not None:
        assert step.block_table is not None
        mask = _chosen(indices, step.block_table.shape[1] * state.key_cache.shape[1])
    out = torch.ops.core.attention.default(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        state.key_cache,
        state.value_cache,
        step.block_table,
        step.slot_mapping,
        step.seq_lens,
        step.query_starts,
        scale=query.shape[3] ** -0.5 if scaling is None else scaling,
        window=state.reach.window,
        chunked=state.reach.chunked,
        softcap=softcap or 0.0,
        sinks=s_aux,
        mask=mask,
        max_query_len=step.max_query_len,
        k_scale=state.k_scale,
        v_scale=state.v_scale,
    )
    return out[None], None


def _chosen(indices: Tensor, num_positions: int) -> Tensor:
    """Return the mask (T, 1, num_positions) bool of the positions that each token chose."""
    rows = indices.flatten(0, -2).long()[:, None]
    hidden = torch.zeros((rows.shape[0], 1, num_positions), dtype=torch.bool, device=rows.device)
    return hidden.scatter(-1, rows, True)


def attach(module: nn.Module, state: LayerState) -> None:
    """Give an attention module its cache; a plain attribute, so that neither state dict nor `.to()` sees it."""
    object.__setattr__(module, _STATE, state)


def detach(module: nn.Module) -> None:
    """Take the cache away again."""
    module.__dict__.pop(_STATE, None)

"""Groups of attention layers that look back equally far, and the number of blocks that each group gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from core.engine.inspect.attention import AttentionLayer
from core.engine.inspect.masks import ALL, Reach

MAX_GROUPS = 4
"""Most groups: each costs a block table and a slot mapping per step. Layers with further windows join the next larger
one."""
_MOST_OF_WINDOWS = 4
"""Groups with windows get blocks for four times as many sequences as fit at full length: most sequences are shorter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroup:
    """Attention layers whose keys and values are kept equally long."""

    reach: Reach
    modules: tuple[nn.Module, ...]
    #: Cache memory of one position in all of them.
    bytes_per_position: int


def make_groups(layers: Mapping[nn.Module, AttentionLayer], *, max_len: int, block_size: int) -> tuple[LayerGroup, ...]:
    """Group layers by reach, those that look back to the first token first.

    A window that holds nearly the longest context saves nothing, and counts as none. A layer whose reach makes no group
    joins the smallest window: of chunks of another size, some begin behind what it sees. Without layers there is one
    group, whose blocks take no memory: they count what the sequences have room for.
    """
    own = {m: layer.reach if layer.reach.window + 2 * block_size < max_len else ALL for m, layer in layers.items()}
    kept = sorted({reach for reach in own.values() if reach.window}, reverse=True)
    kept = kept[: MAX_GROUPS - 1]  # keep the larger ones: a layer with a smaller window may keep more than it needs
    members: dict[Reach, list[nn.Module]] = {reach: [] for reach in (ALL, *kept)}
    others = min((reach for reach in kept if not reach.chunked), default=ALL)
    for module, reach in own.items():
        members[reach if reach in members else others].append(module)
    return tuple(
        LayerGroup(
            reach=reach,
            modules=tuple(modules),
            bytes_per_position=sum(layers[module].bytes_per_position for module in modules),
        )
        for reach, modules in members.items()
        if modules or not layers
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSize:
    """How many blocks each group gets, the null block included, and what they take."""

    num_blocks: tuple[int, ...]
    num_bytes: int
    #: Tokens that have room in the group with the most positions to keep.
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheNeeds:
    """What determines the size of a cache besides memory."""

    groups: Sequence[LayerGroup]
    block_size: int
    #: Tokens of the longest context.
    max_len: int
    #: Sequences at once.
    max_num_seqs: int
    #: Tokens at most in a step, whose positions a window holds besides those that it looks back to.
    max_step_tokens: int
    #: Memory of what does not grow with the tokens: slots of recurrent states.
    fixed_bytes: int = 0

    def size_for(self, num_tokens: int) -> CacheSize:
        """Return the size at which num_tokens tokens have room in layers without a window.

        Windows get what `_MOST_OF_WINDOWS` times as many sequences need as these tokens are at full length.
        """
        size, longest = self.block_size, -(-self.max_len // self.block_size)
        seqs = min(self.max_num_seqs, max(1, _MOST_OF_WINDOWS * num_tokens // (longest * size)))
        blocks = []
        for group in self.groups:
            count = -(-num_tokens // size)
            if group.reach.window:
                own = min(longest, -(-group.reach.window // size) + 2)
                # Twice: a running step still needs blocks that the queued step gives back.
                count = min(count, seqs * own + 2 * -(-self.max_step_tokens // size) + seqs)
            blocks.append(1 + max(count, longest))
        per_block = [group.bytes_per_position * size for group in self.groups]
        total = self.fixed_bytes + sum(count * each for count, each in zip(blocks, per_block, strict=True))
        return CacheSize(num_blocks=tuple(blocks), num_bytes=total, num_tokens=(max(blocks) - 1) * size)

    @property
    def full(self) -> CacheSize:
        """The size at which all sequences have room at full length."""
        return self.size_for(self.max_num_seqs * -(-self.max_len // self.block_size) * self.block_size)

    def size_within(self, num_bytes: int) -> CacheSize | None:
        """Return the largest size of at most so many bytes; None where not even one sequence has room."""
        if self.size_for(self.max_len).num_bytes > num_bytes:
            return None
        least = min(group.bytes_per_position for group in self.groups)
        if not least:
            return self.full  # no tokens take memory
        low, high = self.max_len, num_bytes // least + self.max_len
        while high - low > self.block_size:
            middle = (low + high) // 2
            low, high = (middle, high) if self.size_for(middle).num_bytes <= num_bytes else (low, middle)
        return self.size_for(low)

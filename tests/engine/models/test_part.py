"""core/engine/models/part.py: a process reads what sharding leaves it, and gets what sharding the whole would give."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from core.engine.models.assets import embedded_model
from core.engine.models.loading import build_model, load_model
from core.engine.models.sharding import shard_model
from core.engine.models.tiny import tiny_config
from core.errors import UsageError
from tests.support import refused

HOST = torch.device("cpu")


RANKS = pytest.mark.parametrize("rank", [0, 1])


@contextmanager
def job(rank: int) -> Iterator[None]:
    """Make this process believe that it is one of two. transformers saves nothing on the second."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def saved(folder: Path, name: str, *, base: bool = False, **changes: Any) -> Path:
    """Save a tiny model; base: without its head, so that all names lack their first part."""
    config = tiny_config(name)
    for key, value in changes.items():
        setattr(config, key, value)
    model: Any = build_model(config, torch_device=HOST, dtype=torch.float32).model
    (model.model if base else model).save_pretrained(folder)
    if base:
        model.config.save_pretrained(folder)
    return folder


def equal(found: Any, wanted: Any) -> list[str]:
    """Return the tensors that differ, buffers included."""
    here = dict(found.named_parameters()) | dict(found.named_buffers())
    there = dict(wanted.named_parameters()) | dict(wanted.named_buffers())
    assert here.keys() == there.keys() and type(found) is type(wanted)
    return [name for name in here if not torch.equal(here[name], there[name])]


@pytest.mark.cases(2)
@RANKS
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"tie_word_embeddings": False}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),  # biases of layers whose results are summed
        ("qwen3", {}),
    ],
)
def test_parts_are_those_of_the_whole_model(tmp_path: Path, rank: int, name: str, changes: dict[str, Any]) -> None:
    folder = saved(tmp_path, name, **changes)
    whole = load_model(folder, torch_device=HOST)
    with job(rank):
        found = load_model(folder, torch_device=HOST, sharded=True)
        wanted = shard_model(load_model(folder, torch_device=HOST).model)
    assert found.num_parameters == whole.num_parameters and found.warnings == whole.warnings
    assert found.stop_token_ids == whole.stop_token_ids
    assert equal(found.model, wanted) == []
    read = found.weights_read
    assert read is not None and not read.whole
    parts = {id(each): each.nbytes for each in found.model.parameters()}
    # What rank 0 alone adds is zero elsewhere.
    biases = [each for name, each in found.model.named_parameters() if name.endswith(("o_proj.bias", "down_proj.bias"))]
    zeros = sum(each.nbytes for each in biases) if rank else 0
    assert read.num_bytes == sum(parts.values()) - zeros < read.total_bytes
    assert read.total_bytes == sum(each.nbytes for each in whole.model.parameters())


@RANKS
def test_the_embedded_model_is_read_in_parts(rank: int) -> None:
    with job(rank):
        read = load_model(embedded_model(), torch_device=HOST, sharded=True).weights_read
    assert read is not None and not read.whole and read.num_bytes < 0.51 * read.total_bytes


@RANKS
def test_files_with_other_names_are_read_whole_and_cut(tmp_path: Path, rank: int) -> None:
    folder = saved(tmp_path, "llama", base=True, tie_word_embeddings=True)
    with job(rank):
        found = load_model(folder, torch_device=HOST, sharded=True)
        wanted = shard_model(load_model(folder, torch_device=HOST).model)
    assert equal(found.model, wanted) == []
    read = found.weights_read
    assert read is not None and read.num_bytes == read.total_bytes
    assert "the files do not hold model.embed_tokens.weight" in str(read)


def test_sizes_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama", hidden_size=48, num_attention_heads=3, num_key_value_heads=1)
    with job(0), refused(UsageError, "num_attention_heads is 3"):
        load_model(folder, torch_device=HOST, sharded=True)

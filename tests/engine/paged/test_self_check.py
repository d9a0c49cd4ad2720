"""The self-check of a cache that barely holds one sequence: its probes have room, and two still share each step."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.compilation.options import CompileOptions
from core.engine.config import SamplingParams
from core.engine.inspect.attention import NotPageable
from core.engine.inspect.masks import ALL
from core.engine.inspect.past import Asked
from core.engine.inspect.probe import LONG, SHORT, probe_sequences
from core.engine.models.loading import build_model
from core.engine.models.tiny import tiny_config
from core.engine.paged.blocks import BlockPool
from core.engine.paged.runner import PagedRunner
from core.engine.paged.self_check import Probes, probe_limits
from core.engine.paged.tables import BlockTables
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig
from core.engine.steps.sequence import Sequence
from core.host.selection import select_device

EAGER = CompileOptions(mode="off")
VOCABULARY: Any = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=300)))


@pytest.mark.parametrize("num_drafts", [0, 1, 5])
def test_as_many_probes_as_long_as_the_limits_say_fit_into_an_empty_cache(num_drafts: int) -> None:
    counts = set()
    for size, length, more in product((1, 4, 16, 64), (2, 3, 9, 64, 200), (0, 1, 2, 40)):
        num_blocks = -(-length // size) + more
        limits = {"max_model_len": length, "max_num_seqs": 3}
        longest, most = probe_limits(num_blocks, size, num_drafts=num_drafts, **limits)
        probes = probe_sequences(VOCABULARY, max_model_len=longest, max_num_seqs=most)
        tables = BlockTables([BlockPool(num_blocks + 1)], [ALL], block_size=size, share_prefixes=False)
        for index, probe in enumerate(probes):
            end = min(len(probe) + num_drafts, longest)
            params = SamplingParams(max_new_tokens=end + 1 - len(probe))
            sequence = Sequence(index, probe[:-1], params)
            assert len(probe) <= longest <= length
            assert tables.join(sequence) and tables.grow(sequence, end), (size, length, more)
        counts.add(len(probes))
        assert len(probes) == 2 or num_blocks < 4
    assert counts == {1, 2}


def test_a_roomy_cache_is_checked_with_the_longest_probes_and_one_sequence_with_one_probe() -> None:
    assert probe_limits(100, 16, max_model_len=640, max_num_seqs=8, num_drafts=4) == (640, 8)
    assert probe_limits(40, 16, max_model_len=640, max_num_seqs=1, num_drafts=0) == (640, 1)
    lengths = [len(probe) for probe in probe_sequences(VOCABULARY, max_model_len=640, max_num_seqs=8)]
    assert lengths == [LONG + 1, SHORT + 1]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("cache_tokens", "block_size", "speculative", "probes"),
    [(64, 4, 0, 2), (72, 4, 0, 2), (64, 4, 3, 2), (64, 64, 0, 1), (64, 32, 3, 2)],
)
def test_an_engine_whose_cache_barely_holds_one_sequence_gives_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, cache_tokens: int, block_size: int, speculative: int, probes: int
) -> None:
    checked: list[list[int]] = []
    run = Probes.run

    def spied(self: Probes, asked: list[list[int]], longest: int) -> Any:
        checked.extend(asked)
        return run(self, asked, longest)

    monkeypatch.setattr(Probes, "run", spied)
    prompts = [[5, 6, 7, 8] * 5, [9, 10, 11], [20] * 30]
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    found = []
    for tokens in (cache_tokens, None):
        config = EngineConfig(
            max_num_seqs=3, max_model_len=64, block_size=block_size, cache_tokens=tokens, speculative=speculative,
            options=EAGER,
        )  # fmt: skip
        loaded = build_model(tiny_config("llama"), torch_device=torch.device("cpu"), dtype=torch.float32)
        with Engine(loaded, select_device("cpu"), config) as engine:
            assert engine.route == "paged"
            found.append([done.token_ids for done in engine.generate(prompts, params)])
        if tokens is not None:
            assert len(checked) == probes and max(map(len, checked)) <= 64
    assert found[0] == found[1] and [len(tokens) for tokens in found[0]] == [8, 8, 8]


def test_a_model_that_mixes_the_sequences_of_a_step_is_found_in_a_cache_that_barely_holds_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Its temperatures count positions over the whole step, where it is not told of each token's.
    monkeypatch.setattr("core.engine.paged.model.what_layers_ask", lambda model: Asked())
    kinds: dict[str, Any] = {"attention_chunk_size": 4096, "layer_types": ["full_attention"] * 2}
    tuned = {"floor_scale": 16, "attn_scale": 1.0, "attn_temperature_tuning": True, "no_rope_layers": [0, 0]}
    mixing = tiny_config("llama4_text", **kinds, **tuned)
    model = build_model(mixing, torch_device=torch.device("cpu"), dtype=torch.float32).model
    config = EngineConfig(max_num_seqs=3, block_size=4, cache_tokens=64, options=EAGER)
    with pytest.raises(NotPageable, match="or mixes sequences of a step"):
        PagedRunner(model, select_device("cpu"), config, max_model_len=64)

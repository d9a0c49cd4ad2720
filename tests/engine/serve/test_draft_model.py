"""What a draft model may be, what its cache takes, and that tokens come as often as without it."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from core.common.graphs.backend import GraphKey
from core.device import Device, MemoryInfo
from core.engine.config import SamplingParams
from core.engine.http.load import load_of
from core.engine.http.metrics import Metrics
from core.engine.models.assets import embedded_model
from core.engine.models.loading import LoadedModel, load_model
from core.engine.paged.model import PagedModel
from core.engine.paged.room import Room
from core.engine.serve.engine import Engine
from core.engine.steps.draft_model import DraftModel
from core.engine.steps.runner import EngineConfig
from core.errors import ModelError, UsageError
from tests.engine.serve.drafted import CONFIG, MAX_LEN, nearly, tiny
from tests.engine.serve.drafted import one_thread as one_thread
from tests.recording import acme

EAGER = replace(CONFIG, cache_tokens=None, options=replace(CONFIG.options, mode="off"))
GREEDY = SamplingParams(max_new_tokens=20, ignore_eos=True)
TEXTS = ["If the argument is", "Return a list of the names", "The"]


@pytest.fixture(scope="module")
def embedded() -> LoadedModel:
    return load_model(embedded_model(), torch_device=torch.device("cpu"), dtype=torch.float32)


def shortened(loaded: LoadedModel, num_layers: int) -> LoadedModel:
    """Return a copy that has the first layers alone."""
    model: Any = copy.deepcopy(loaded.model)
    model.model.layers = model.model.layers[:num_layers]
    model.config.num_hidden_layers = num_layers
    return replace(loaded, model=model, config=model.config)


def tokens_of(
    loaded: LoadedModel, config: EngineConfig, params: SamplingParams
) -> tuple[list[tuple[int, ...]], int, int]:
    """Return the tokens of all texts, and how many of them a model drafted and were accepted."""
    with Engine(loaded, acme(), config) as engine:
        found = [each.token_ids for each in engine.generate(TEXTS, params)]
        stats = engine.stats()
    return found, stats.drafted["model"], stats.accepted["model"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, temperature=0.8, top_p=0.9, seed=7)], ids=["greedy", "hot"])
def test_tokens_are_those_without_drafts(embedded: LoadedModel, params: SamplingParams) -> None:
    plain, drafted, _ = tokens_of(embedded, replace(EAGER, speculative=0), params)
    assert drafted == 0
    itself, drafted, accepted = tokens_of(embedded, replace(EAGER, draft_model=embedded_model()), params)
    assert itself == plain and accepted == drafted > 30
    short, drafted, accepted = tokens_of(embedded, replace(EAGER, draft_model=shortened(embedded, 3)), params)
    assert short == plain and 0 < accepted < drafted


@pytest.mark.slow
def test_sampled_tokens_come_as_often_as_the_model_says() -> None:
    """The third token of 400 seeds against its probability, summed over all that may come before it."""
    served, size, count = tiny(vocab_size=8), 8, 400
    params = SamplingParams(max_new_tokens=4, temperature=1.0, ignore_eos=True)
    config = replace(EAGER, max_num_seqs=40, decode_buckets=(40,), prefill_buckets=(120,), max_model_len=16)
    found = []
    for drafts in ({"draft_model": nearly(served, 0.2)}, {"speculative": 0}):
        with Engine(served, acme(), replace(config, **drafts)) as engine:  # type: ignore[arg-type]
            done = engine.generate([[5, 6, 3]] * count, [replace(params, seed=seed) for seed in range(count)])
            found.append([each.token_ids for each in done])
            stats = engine.stats()
            if drafts.get("speculative") is None:
                assert 0.2 < stats.accepted["model"] / stats.drafted["model"] < 0.95
    assert found[0] == found[1]
    pairs = list(itertools.product(range(size), repeat=2))
    with torch.no_grad():
        logits = served.model(input_ids=torch.tensor([[5, 6, 3, *pair] for pair in pairs]), use_cache=False).logits
    first, second, third = logits[:, 2:].softmax(-1).unbind(1)
    one, two = torch.tensor(pairs).unbind(1)
    rows = torch.arange(len(pairs))
    expected = count * (first[rows, one] * second[rows, two]) @ third
    seen = Counter(tokens[2] for tokens in found[0])
    counts = torch.tensor([seen[token] for token in range(size)])
    # 99.99 % of chi-square at 7 degrees of freedom.
    assert ((counts - expected) ** 2 / expected).sum() < 29.88


class Vocabulary:
    """A tokenizer as far as its vocabulary goes."""

    def __init__(self, size: int, **changes: int) -> None:
        self._vocab = {f"t{index}": index for index in range(size)} | changes

    def get_vocab(self) -> dict[str, int]:
        return self._vocab


@pytest.mark.cases(1)
@pytest.mark.parametrize(("ours", "theirs"), [(160, 150), (150, 160)])
def test_models_of_one_tokenizer_may_pad_their_embeddings_differently(ours: int, theirs: int) -> None:
    served = replace(tiny(vocab_size=ours), tokenizer=Vocabulary(140))
    draft = replace(tiny(vocab_size=theirs, seed=2), tokenizer=Vocabulary(140))
    with Engine(served, acme(), replace(EAGER, draft_model=draft)) as engine:
        engine.loaded = plain = replace(served, tokenizer=None)
        prompts = [[ours - 1, 3, 4], [7, ours - 2]]
        found = [each.token_ids for each in engine.generate(prompts, GREEDY)]
        assert engine.stats().drafted["model"] > 0
    with Engine(plain, acme(), replace(EAGER, speculative=0)) as engine:
        assert [each.token_ids for each in engine.generate(prompts, GREEDY)] == found


def refused(served: LoadedModel, draft: Any, **changes: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        Engine(served, acme(), replace(EAGER, draft_model=draft, **changes))
    assert not any(hasattr(module, "_core_attention") for module in served.model.modules())
    return caught.value


def test_a_draft_model_that_does_not_fit_is_refused_and_says_why(embedded: LoadedModel) -> None:
    served = tiny()
    error = refused(served, tiny(vocab_size=150))
    assert error.asked == "drafts of a LlamaForCausalLM for a LlamaForCausalLM"
    assert error.found == "it has 150 tokens, the served model 160"
    ours = replace(served, tokenizer=Vocabulary(9))
    error = refused(ours, replace(tiny(), tokenizer=Vocabulary(9, t4=5)))
    assert error.found == "the token 't4' is 4 to the served model and 5 to this one"
    error = refused(ours, replace(tiny(), tokenizer=Vocabulary(12)))
    assert error.found == "it has 12 tokens, the served model 9"
    error = refused(served, tiny(max_position_embeddings=32))
    assert error.found == f"it has 32 positions, and sequences here have up to {MAX_LEN}"
    assert "max_model_len=32" in error.remedy
    assert "one cache" in refused(served, served).found
    error = refused(served, tiny("codegen"))
    assert "it can't run on the paged cache: " in error.found
    assert "drafts nothing" in refused(embedded, embedded_model(), speculative=0).found


def test_no_drafts_of_a_model_on_the_static_cache() -> None:
    served = tiny("codegen")
    error = refused(served, tiny())
    assert "CodeGenForCausalLM can't run on the paged cache, which alone takes drafts back" in error.found
    assert error.remedy == "leave the draft model out"


@pytest.mark.slow
def test_a_model_that_drafts_is_served_by_nobody_else() -> None:
    draft = tiny(seed=1)
    taken = pytest.raises(UsageError, match="served by another engine")
    with Engine(tiny(), acme(), replace(EAGER, draft_model=draft)), taken:
        Engine(draft, acme(), EAGER)
    assert not any(hasattr(module, "_core_attention") for module in draft.model.modules())
    with Engine(draft, acme(), EAGER) as engine:
        assert engine.generate([[5]], GREEDY)


def test_the_cache_of_the_draft_model_counts() -> None:
    device = acme()
    served, draft = (PagedModel(each.model, device, EAGER, max_model_len=MAX_LEN) for each in (tiny(), tiny(seed=1)))
    alone = Room([served], device, EAGER, max_model_len=MAX_LEN)
    both = Room([served, draft], device, EAGER, max_model_len=MAX_LEN)
    caches = [both.make_cache(each) for each in (served, draft)]
    assert [both.groups_of(each) for each in (served, draft)] == [slice(0, 1), slice(1, 2)]
    num_bytes = [each.num_bytes for each in caches]
    for cache in caches:
        cache.close()
    assert num_bytes[0] == num_bytes[1] == alone._size.num_bytes and both._size.num_bytes == sum(num_bytes)
    # Room for one of them, and all of it is free.
    free = MemoryInfo(used_bytes=0, total_bytes=num_bytes[0], peak_bytes=0)
    small: Device = replace(device, parts=replace(device.parts, memory=lambda: free))
    config = replace(EAGER, cache_tokens=EAGER.max_num_seqs * MAX_LEN)
    assert Room([served], small, config, max_model_len=MAX_LEN)._size == alone._size
    with pytest.raises(ModelError, match="a key/value cache of"):
        Room([served, draft], small, config, max_model_len=MAX_LEN)


def test_waiting_for_graphs_waits_for_those_that_draft_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(tiny(), acme(), replace(EAGER, draft_model=tiny(seed=1))) as engine:
        assert engine.wait_compiled() and engine.wait_compiled(0)
        assert isinstance(engine.drafter, DraftModel)
        monkeypatch.setattr(engine.drafter._runner.program, "wait_compiled", lambda timeout_s: False)
        assert not engine.wait_compiled(0)


def test_graphs_under_way_are_counted_with_those_that_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(tiny(), acme(), replace(EAGER, draft_model=tiny(seed=1))) as engine:
        assert load_of(engine).pending_graphs == 0
        assert isinstance(engine.drafter, DraftModel)
        for runner, sizes, count in ((engine._runner, (1,), 1), (engine.drafter._runner, (1, 2), 3)):
            pending = tuple(GraphKey("decode", (size,)) for size in sizes)
            report = replace(runner.program.report(), pending=pending)
            monkeypatch.setattr(runner.program, "report", lambda report=report: report)
            assert load_of(engine).pending_graphs == count


@pytest.mark.slow
def test_metrics_tell_drafts_by_kind() -> None:
    metrics = Metrics()
    with Engine(tiny(), acme(), replace(EAGER, draft_model=tiny())) as engine:
        engine.generate([[5, 6, 7]], GREEDY)
        text = metrics.render(None, engine.stats()).decode()
        assert engine.drafter.report() is not engine.report()
    assert 'core_engine_drafted_total{kind="model"} 14.0' in text
    assert 'core_engine_accepted_total{kind="model"} 14.0' in text

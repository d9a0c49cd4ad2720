"""Generation with the embedded model: batches, queues, stops, bounds, streaming, sampling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.compilation.options import CompileOptions
from core.engine.config import SamplingParams
from core.engine.inspect.attention import implementation
from core.engine.models.assets import embedded_model
from core.engine.models.loading import build_model, load_model
from core.engine.models.tiny import tiny_config
from core.engine.serve.engine import Engine
from core.engine.serve.request import Completion
from core.engine.steps.runner import EngineConfig
from core.errors import ModelError, UsageError
from core.host.selection import select_device
from tests.engine.models.shallow import shallow_model
from tests.installed import needs_static_cache
from tests.marks import slow_except
from tests.recording import acme

CPU = torch.device("cpu")
TEXTS = ["If the argument is", "Return a list of the names", "This", "The Python interpreter is a program that reads"]
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)
CONFIG = EngineConfig(
    max_num_seqs=4,
    max_model_len=96,
    decode_buckets=(1, 2, 4),
    prefill_buckets=(16, 64),
    options=CompileOptions(lowering="inline"),
)
SMALL = EngineConfig(max_num_seqs=1, max_model_len=32, options=CompileOptions(mode="off"))
IDS = ([5, 6, 7], [8, 9, 10, 11, 12], [13, 14])


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The first layer of the embedded model with room for four sequences."""
    with Engine.load(shallow_model(), "cpu", CONFIG) as engine:
        assert engine.route == "paged"
        yield engine


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[Completion]:
    """What each text gives by itself."""
    return [engine.generate([text], GREEDY, collect_logits=True)[0] for text in TEXTS]


@pytest.mark.slow
def test_the_texts_differ_in_length_and_continuation(alone: list[Completion]) -> None:
    assert len({len(c.prompt_token_ids) for c in alone}) >= 3
    assert len({c.token_ids for c in alone}) == 4
    assert all(len(c.token_ids) == 12 and c.finish_reason == "length" and c.text for c in alone)


@pytest.mark.parametrize("count", [2, 3, 4])  # 3 running sequences pad a bucket of 4
def test_a_batch_gives_exactly_the_tokens_of_each_alone(engine: Engine, alone: list[Completion], count: int) -> None:
    together = engine.generate(TEXTS[:count], GREEDY, collect_logits=True)
    for mine, other in zip(together, alone, strict=False):
        assert (mine.token_ids, mine.text) == (other.token_ids, other.text)
        assert mine.logits is not None and other.logits is not None
        torch.testing.assert_close(mine.logits, other.logits, rtol=0, atol=1e-4)


def test_prompts_beyond_the_room_wait_for_their_turn(engine: Engine, alone: list[Completion]) -> None:
    each = [SamplingParams(max_new_tokens=3 + 2 * (i % 4), ignore_eos=True) for i in range(11)]
    completions = engine.generate([TEXTS[i % 4] for i in range(11)], each)
    for index, completion in enumerate(completions):
        assert completion.token_ids == alone[index % 4].token_ids[: each[index].max_new_tokens]


def test_the_logits_are_those_the_tokens_were_chosen_from(alone: list[Completion]) -> None:
    for completion in alone:
        assert completion.logits is not None and completion.logits.shape == (12, 2048)
        assert completion.logits.argmax(-1).tolist() == list(completion.token_ids)


def test_pieces_add_up_to_the_text_and_name_their_prompt(engine: Engine, alone: list[Completion]) -> None:
    pieces: dict[int, list[str]] = {0: [], 1: []}
    completions = engine.generate(TEXTS[:2], GREEDY, on_text=lambda index, piece: pieces[index].append(piece))
    for index, completion in enumerate(completions):
        assert all(pieces[index]) and len(pieces[index]) >= 2  # a fast machine computes a row of steps before a piece
        assert "".join(pieces[index]) == completion.text == alone[index].text


def test_a_stop_token_ends_the_sequence_and_is_not_in_its_text(engine: Engine, alone: list[Completion]) -> None:
    stop = alone[0].token_ids[5]
    first = alone[0].token_ids.index(stop)
    (completion,) = engine.generate(TEXTS[:1], SamplingParams(max_new_tokens=12, stop_token_ids=(stop,)))
    assert completion.token_ids == alone[0].token_ids[: first + 1]
    assert completion.finish_reason == "stop"
    assert alone[0].text.startswith(completion.text)
    assert len(completion.text) < len(alone[0].text)


def test_a_stop_string_cuts_the_text(engine: Engine, alone: list[Completion]) -> None:
    text = alone[1].text
    stop = text[10:14]
    pieces: list[str] = []
    (completion,) = engine.generate(
        TEXTS[1:2],
        SamplingParams(max_new_tokens=12, stop=(stop,), ignore_eos=True),
        on_text=lambda _, piece: pieces.append(piece),
    )
    assert completion.text == text[: text.index(stop)] == "".join(pieces)
    assert completion.finish_reason == "stop"


def test_one_sequence_may_stop_while_its_mates_go_on(engine: Engine, alone: list[Completion]) -> None:
    stop = SamplingParams(max_new_tokens=12, stop_token_ids=(alone[0].token_ids[2],), ignore_eos=True)
    first, second = engine.generate(TEXTS[:2], [stop, GREEDY])
    assert first.finish_reason == "stop"
    assert len(first.token_ids) <= 3
    assert second.token_ids == alone[1].token_ids


def test_the_context_bounds_what_is_generated(engine: Engine) -> None:
    prompt = [5 + i % 50 for i in range(60)]
    (completion,) = engine.generate([prompt], SamplingParams(max_new_tokens=50, ignore_eos=True))
    assert len(completion.token_ids) == 96 - 60
    assert completion.finish_reason == "length"


def test_a_prompt_longer_than_every_prefill_bucket_is_computed_in_chunks(engine: Engine) -> None:
    prompt = [7 + 3 * i % 50 for i in range(90)]  # no other test has begun a prompt like this
    before = engine.stats()
    (completion,) = engine.generate([prompt], SamplingParams(max_new_tokens=6, ignore_eos=True), collect_logits=True)
    after = engine.stats()
    assert (after.chunked - before.chunked, after.steps["prefill"] - before.steps.get("prefill", 0)) == (1, 2)
    assert completion.logits is not None
    with torch.no_grad(), implementation(engine.loaded.model, engine.native_attention):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        expected = engine.loaded.model(input_ids=ids, use_cache=False).logits[0, 89:-1]
    torch.testing.assert_close(completion.logits, expected, rtol=0, atol=1e-4)


def test_a_prompt_longer_than_the_context_is_refused_before_anything_runs(engine: Engine) -> None:
    seen: list[str] = []
    with pytest.raises(ModelError, match="the context holds 96") as caught:
        engine.generate([TEXTS[0], [7] * 96], GREEDY, on_text=lambda _, piece: seen.append(piece))
    assert "at most 95 tokens" in caught.value.remedy
    assert not seen


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(engine: Engine, prompt: str | list[int]) -> None:
    with pytest.raises(ModelError):
        engine.generate([prompt], GREEDY)


def test_no_prompts_give_no_completions(engine: Engine) -> None:
    assert engine.generate([], GREEDY) == []


def test_a_seed_gives_the_same_text_whoever_shares_the_batch(engine: Engine) -> None:
    sampled = [SamplingParams(max_new_tokens=12, temperature=1.0, seed=s, ignore_eos=True) for s in (1, 2, 3)]
    alone = [engine.generate([TEXTS[0]], params)[0].token_ids for params in sampled]
    assert len(set(alone)) == 3
    assert engine.generate([TEXTS[0]], sampled[0])[0].token_ids == alone[0]
    mixed = engine.generate([TEXTS[0], TEXTS[1], TEXTS[0], TEXTS[0]], [sampled[2], GREEDY, sampled[0], sampled[1]])
    assert [mixed[i].token_ids for i in (2, 3, 0)] == alone
    assert mixed[1].token_ids == engine.generate([TEXTS[1]], GREEDY)[0].token_ids


@pytest.mark.slow
def test_what_was_not_captured_is_sampled_outside_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    params = [SamplingParams(max_new_tokens=6, temperature=1.0, seed=3, ignore_eos=True), GREEDY]
    found = []
    for sampling in (("greedy",), ("random",), ("greedy", "random")):
        loaded = build_model(tiny_config("llama"), torch_device=CPU, dtype=torch.float32)
        with Engine(loaded, select_device("cpu"), replace(SMALL, max_num_seqs=2, sampling=sampling)) as engine:
            with caplog.at_level("WARNING"):
                found.append([c.token_ids for c in engine.generate([IDS[0]] * 4, params * 2)])
            # Two sequences of six tokens, or their first ones, which come from the prefill.
            assert engine.stats().sampled_outside == (12 if sampling == ("greedy",) else 2)
    assert found[0] == found[1] == found[2]
    assert [r.message.startswith("sampling outside of the captured graph") for r in caplog.records] == [True]


def test_a_closed_engine_takes_no_request() -> None:
    loaded = build_model(tiny_config("llama"), torch_device=CPU, dtype=torch.float32)
    engine = Engine(loaded, select_device("cpu"), SMALL)
    engine.add_request([5, 6, 7])
    engine.step()
    waiting = engine.add_request([5, 6, 7])
    engine.abort(waiting)
    engine.close()
    assert not engine.has_unfinished and engine.stats().joined == engine.stats().ended == 1
    for call in (lambda: engine.add_request([5, 6, 7]), engine.step):
        with pytest.raises(UsageError, match="the engine is closed"):
            call()


def test_requests_and_ids_of_another_kind_are_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match=r"neither a core\.SamplingParams nor a mapping"):
        engine.add_request([5, 6, 7], 3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="pass an id that add_request returned"):
        engine.abort("first")  # type: ignore[arg-type]


def test_parameters_must_match_the_prompts(engine: Engine) -> None:
    with pytest.raises(UsageError, match="sampling parameters for 1"):
        engine.generate(TEXTS[:2], [GREEDY])


def test_a_generation_that_is_interrupted_returns_its_blocks(engine: Engine, alone: list[Completion]) -> None:
    def interrupt(index: int, piece: str) -> None:
        raise KeyboardInterrupt

    free = free_blocks(engine)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(TEXTS, GREEDY, on_text=interrupt)
    assert free_blocks(engine) == free
    assert engine.generate(TEXTS[:1], GREEDY)[0].token_ids == alone[0].token_ids


def free_blocks(engine: Engine) -> list[int]:
    return [pool.num_free for pool in engine._runner.cache.pools]  # type: ignore[attr-defined]


class Broken(Exception):
    """What a callback of the user raises."""


@pytest.mark.cases(1)
@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
@pytest.mark.parametrize("model_type", ["llama", "bloom"])
def test_an_error_in_the_middle_of_a_step_leaves_the_engine_usable(
    model_type: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_static_cache(model_type)
    loaded = build_model(tiny_config(model_type), torch_device=CPU, dtype=torch.float32)
    with Engine(loaded, select_device("cpu"), replace(SMALL, max_num_seqs=2)) as engine:
        expected = engine.generate(IDS, GREEDY)
        forward, calls = loaded.model.forward, list[int]()

        def failing(*arguments: Any, **options: Any) -> Any:
            output = forward(*arguments, **options)
            calls.append(1)
            if len(calls) == 3:
                raise error
            return output

        with monkeypatch.context() as patch:
            patch.setattr(loaded.model, "forward", failing)
            with pytest.raises(error):
                engine.generate(IDS, GREEDY)
        assert [c.token_ids for c in engine.generate(IDS, GREEDY)] == [c.token_ids for c in expected]
        if engine.route == "paged":
            assert engine._runner._paged.steps[0].block_table is None  # type: ignore[attr-defined]
            assert all(pool.num_free == pool.num_blocks - 1 for pool in engine._runner.cache.pools)  # type: ignore[attr-defined]


def test_an_error_of_the_callback_returns_the_blocks(engine: Engine, alone: list[Completion]) -> None:
    seen: list[str] = []

    def broken(index: int, piece: str) -> None:
        seen.append(piece)
        if len(seen) == 6:
            raise Broken

    free = free_blocks(engine)
    with pytest.raises(Broken):
        engine.generate([*TEXTS, *TEXTS], GREEDY, on_text=broken)
    assert free_blocks(engine) == free
    assert [c.token_ids for c in engine.generate(TEXTS, GREEDY)] == [c.token_ids for c in alone]


@pytest.mark.parametrize("model_type", ["llama", "bloom"])
def test_a_model_serves_one_engine_at_a_time(model_type: str) -> None:
    needs_static_cache(model_type)
    loaded = build_model(tiny_config(model_type), torch_device=CPU, dtype=torch.float32)
    first = Engine(loaded, select_device("cpu"), SMALL)
    expected = first.generate(IDS, GREEDY)
    with pytest.raises(UsageError, match="the model is served by another engine"):
        Engine(loaded, select_device("cpu"), SMALL)
    assert [c.token_ids for c in first.generate(IDS, GREEDY)] == [c.token_ids for c in expected]
    first.close()
    with Engine(loaded, select_device("cpu"), SMALL) as second:
        first.close()  # once more: it must not touch what the second attached
        assert [c.token_ids for c in second.generate(IDS, GREEDY)] == [c.token_ids for c in expected]
    assert loaded.config._attn_implementation != "core"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "ahead"),
    slow_except(
        [("llama", False), ("llama", True), ("mamba", False), ("codegen", False)], ("llama", False), ("mamba", False)
    ),
)
def test_an_engine_made_in_inference_mode_generates_in_any(model_type: str, ahead: bool) -> None:
    loaded, found = build_model(tiny_config(model_type, num_hidden_layers=1), torch_device=CPU), []
    config = replace(SMALL, options=CompileOptions(mode="full"), sampling=("greedy",), run_ahead=ahead)
    with torch.inference_mode():
        engine = Engine(loaded, acme(), config)
    with engine:
        for mode in (torch.inference_mode, torch.enable_grad):
            with mode():
                found += engine.generate([[5, 6, 7, 5, 6]], GREEDY)
    assert found[0].token_ids == found[1].token_ids


def test_weights_loaded_in_inference_mode_are_no_inference_tensors(pristine: Path) -> None:
    with torch.inference_mode(), Engine.load(pristine, "cpu", SMALL) as engine:
        assert not any(weight.is_inference() for weight in engine.loaded.model.parameters())


def test_a_refused_engine_does_not_hold_the_model() -> None:
    loaded = build_model(tiny_config("llama"), torch_device=CPU, dtype=torch.float32)
    with pytest.raises(UsageError):
        Engine(loaded, select_device("cpu"), replace(SMALL, options=CompileOptions(lowering="nonsense")))
    Engine(loaded, select_device("cpu"), SMALL).close()


def test_calling_a_served_model_says_who_has_it() -> None:
    loaded = build_model(tiny_config("llama"), torch_device=CPU, dtype=torch.float32)
    ids = torch.tensor([[3, 4, 5]])
    with Engine(loaded, select_device("cpu"), SMALL) as engine:
        engine.generate(IDS, GREEDY)
        with pytest.raises(UsageError, match="an engine serves it, and none of its steps is running"):
            loaded.model(input_ids=ids)
    assert loaded.model(input_ids=ids).logits.shape[:2] == (1, 3)


@pytest.mark.slow
def test_modes_may_leave_out_decode_on_the_static_route() -> None:
    needs_static_cache("bloom")
    loaded = build_model(tiny_config("bloom", num_hidden_layers=1), torch_device=CPU, dtype=torch.float32)
    config = replace(SMALL, options=CompileOptions(mode={"prefill": "off"}, lowering="inline"))
    with Engine(loaded, select_device("cpu"), config) as engine:
        assert engine.route == "static"
        assert engine.generate([[5, 6, 7]], GREEDY)[0].finish_reason == "length"


def test_what_torch_compiles_during_a_step_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = build_model(tiny_config("llama"), torch_device=CPU, dtype=torch.float32)
    with Engine(loaded, select_device("cpu"), SMALL) as engine:
        engine.generate([[5, 6, 7]], GREEDY)
        assert not engine.report().compiles
        forward = loaded.model.forward
        compiled = torch.compile(lambda x: x + 1, backend="eager")

        def compiling(*arguments: Any, **options: Any) -> Any:
            compiled(torch.ones(1))
            return forward(*arguments, **options)

        monkeypatch.setattr(loaded.model, "forward", compiling)
        engine.generate([[5, 6, 7]], GREEDY)
        assert list(engine.report().compiles.values()) == [1]


def test_two_engines_live_in_one_process(engine: Engine, alone: list[Completion]) -> None:
    other = build_model(tiny_config("qwen3"), torch_device=CPU, dtype=torch.float32)
    config = EngineConfig(
        max_num_seqs=1, max_model_len=32, decode_buckets=(1,), prefill_buckets=(32,), options=CompileOptions(mode="off")
    )
    with Engine(other, select_device("cpu"), config) as second:
        (first,) = second.generate([[5, 6, 7]], GREEDY)
        assert engine.generate(TEXTS[:1], GREEDY)[0].token_ids == alone[0].token_ids
        assert second.generate([[5, 6, 7]], GREEDY)[0].token_ids == first.token_ids
        assert first.text == ""
    assert engine.generate(TEXTS[:1], GREEDY)[0].token_ids == alone[0].token_ids


def test_without_a_tokenizer_a_stop_string_is_refused() -> None:
    loaded = build_model(tiny_config("llama"), torch_device=CPU, dtype=torch.float32)
    config = EngineConfig(max_num_seqs=1, max_model_len=32, options=CompileOptions(mode="off"))
    with Engine(loaded, select_device("cpu"), config) as engine, pytest.raises(ModelError, match="no tokenizer"):
        engine.generate([[5, 6, 7]], SamplingParams(stop=("x",)))


def test_more_context_than_the_model_has_is_refused() -> None:
    loaded = load_model(embedded_model(), torch_device=CPU)
    with pytest.raises(UsageError, match="the model has 512 positions"):
        Engine(loaded, select_device("cpu"), EngineConfig(max_model_len=513))


def test_a_model_of_one_position_is_refused() -> None:
    loaded = build_model(tiny_config("llama", max_positions=1), torch_device=CPU, dtype=torch.float32)
    with pytest.raises(UsageError, match="a context of 1") as caught:
        Engine(loaded, select_device("cpu"), EngineConfig(options=CompileOptions(mode="off")))
    assert "take 2 positions" in caught.value.found


def test_the_context_defaults_to_the_models_own() -> None:
    loaded = build_model(tiny_config("llama", max_positions=40), torch_device=CPU, dtype=torch.float32)
    with Engine(
        loaded, select_device("cpu"), EngineConfig(max_num_seqs=1, options=CompileOptions(mode="off"))
    ) as engine:
        assert engine.max_model_len == 40
        assert engine.report().num_traces == 0

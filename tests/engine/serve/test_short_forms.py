"""The short forms of the engine: a device by its name, one prompt alone, settings by name, a model in hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from core import CompileOptions, Engine, EngineConfig, SamplingParams
from core.engine.models.assets import embedded_model
from core.engine.models.loading import build_model, load_model
from core.errors import ModelError, UsageError
from tests.support import refused

CONFIG = EngineConfig(max_num_seqs=1, max_model_len=32, options=CompileOptions(mode="off"))


def test_an_engine_takes_names_texts_and_a_stop_string() -> None:
    with Engine(load_model(embedded_model(), torch_device=torch.device("cpu")), "cpu", CONFIG) as engine:
        assert engine.device.name == "cpu"
        (whole,) = engine.generate("This", SamplingParams(max_new_tokens=4, ignore_eos=True))
        assert (
            whole.token_ids == engine.generate(["This"], SamplingParams(max_new_tokens=4, ignore_eos=True))[0].token_ids
        )
        stop = whole.text[1:3]
        (ended,) = engine.generate("This", SamplingParams(max_new_tokens=4, stop=stop))
        assert stop not in ended.text and whole.text.startswith(ended.text)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Give an engine on the embedded model, made by mappings and a `torch.device`."""
    config = {"max_num_seqs": 2, "max_model_len": 32, "options": {"mode": "off"}}
    with Engine.load(embedded_model(), torch.device("cpu"), config) as made:
        yield made


@pytest.mark.parametrize(
    ("options", "words"),
    [({"providers": {"core::attention": "none"}}, "name one of: cpu_attention"), ({"lowering": "none"}, "none")],
    ids=["implementation", "lowering"],
)
def test_what_a_device_lacks_is_refused_before_weights_are_read(
    options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core.engine.serve.engine.load_model", lambda *_, **__: pytest.fail("weights were read"))
    with refused(UsageError, words):
        Engine.load(embedded_model(), "cpu", {"options": options})


def of(engine: Engine, prompts: Any, *params: Any, **settings: Any) -> list[tuple[int, ...]]:
    return [each.token_ids for each in engine.generate(prompts, *params, **settings)]


def test_prompts_come_in_any_form(engine: Engine) -> None:
    asked, ids = SamplingParams(max_new_tokens=3), [1, 2, 3]
    one = of(engine, [ids], asked)
    assert (
        of(engine, ids, asked) == of(engine, torch.tensor(ids), asked) == of(engine, (ids for _ in "1"), asked) == one
    )
    assert of(engine, torch.tensor([ids, ids]), asked) == of(engine, [torch.tensor(ids)] * 2, asked) == one * 2
    assert of(engine, iter(("This", "That")), asked) == of(engine, ["This", "That"], asked)
    assert of(engine, []) == []


def test_settings_come_by_name_or_as_a_mapping(engine: Engine) -> None:
    one = of(engine, "This", SamplingParams(max_new_tokens=3))
    assert of(engine, "This", max_new_tokens=3) == of(engine, "This", {"max_new_tokens": 3}) == one
    assert of(engine, ["This", "This"], [{"max_new_tokens": 3}, SamplingParams(max_new_tokens=3)]) == one * 2


@pytest.mark.parametrize("prompts", [None, 3, b"Once", {"role": "user"}])
def test_what_is_no_prompt_is_refused(engine: Engine, prompts: Any) -> None:
    with refused(UsageError, "which is no prompt", "a list of token ids"):
        engine.generate(prompts)


@pytest.mark.parametrize(
    ("params", "settings", "told"),
    [
        (4, {}, "neither a core.SamplingParams nor a mapping"),
        ({"max_tokens": 3}, {}, "did you mean 'max_new_tokens'"),
        (None, {"max_tokens": 3}, "did you mean 'max_new_tokens'"),
        (None, {"min_new_tokens": 3}, "did you mean 'min_tokens'"),
        (SamplingParams(), {"stop": "x"}, "both say"),
    ],
)
def test_wrong_settings_are_refused(engine: Engine, params: Any, settings: Any, told: str) -> None:
    for call in (engine.generate, engine.add_request):
        with refused(UsageError, told):
            call("This", params, **settings)


def test_a_request_takes_settings_by_name(engine: Engine) -> None:
    found = []
    for given, settings in ((None, {"max_new_tokens": 3}), ({"max_new_tokens": 3}, {})):
        engine.add_request("This", given, **settings)  # type: ignore[arg-type]
        outputs = [each for _ in iter(lambda: engine.has_unfinished, False) for each in engine.step()]
        found.append("".join(each.text for each in outputs))
    assert found[0] == found[1] != ""


def test_sequences_of_settings_become_tuples() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[2], logit_bias={3: 1.0})  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("a",), (2,), ((3, 1.0),))
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]
    assert EngineConfig(decode_buckets=[8]).decode_buckets == (8,)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "told"),
    [({"prefix_caching": "no"}, "give bool"), ({"max_len": 3}, "did you mean 'max_model_len'"), (3, "EngineConfig(…)")],
)
def test_wrong_configurations_are_refused_before_anything_is_read(given: Any, told: str) -> None:
    with refused(UsageError, told):
        Engine.load("no/such/folder", "cpu", given)


@pytest.mark.slow
def test_a_model_in_hand_is_served(engine: Engine) -> None:
    loaded = load_model(embedded_model(), torch_device=torch.device("cpu"))
    model = loaded.model.train()
    with Engine(model, "cpu", CONFIG, tokenizer=loaded.tokenizer) as made:
        assert of(made, "This", max_new_tokens=3) == of(engine, "This", max_new_tokens=3)
    assert not model.training
    with Engine(model, "cpu", CONFIG) as made, refused(ModelError, "make it with tokenizer=…"):
        made.generate("This")


def test_what_is_no_language_model_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    for wrong in (3, "folder", torch.nn.Linear(2, 2)):
        with refused(UsageError, "no causal language model of transformers", "Engine.load(folder, device)"):
            Engine(wrong, "cpu")  # type: ignore[arg-type]
    with refused(UsageError, "has its own"):
        loaded = load_model(embedded_model(), torch_device=torch.device("cpu"))
        Engine(loaded, "cpu", CONFIG, tokenizer=object())
    tiny = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with refused(ModelError, "no output layer"):
        Engine(transformers.LlamaModel(tiny), "cpu", CONFIG)
    with refused(UsageError, "its weights are on meta"):
        Engine(build_model(tiny, torch_device=torch.device("cpu")).model.to("meta"), "cpu", CONFIG)
    bert = transformers.BertConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    with refused(ModelError, "encoder"):
        Engine(transformers.BertForMaskedLM(bert), "cpu", CONFIG)

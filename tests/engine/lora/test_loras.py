"""Adapters in an engine: several in one batch, each as if merged; they come and go while graphs stay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.common.numerics import Verdict, judge
from core.compilation.options import CompileOptions
from core.device import Device
from core.engine.check.eager import forward_logits_of, fp64_logits
from core.engine.config import SamplingParams
from core.engine.inspect.attention import implementation
from core.engine.models.loading import LoadedModel, build_model
from core.engine.models.tiny import tiny_config
from core.engine.parallel.rank import Rank
from core.engine.serve.engine import Engine
from core.engine.serve.leading import make_engine
from core.engine.serve.request import Completion
from core.engine.steps.runner import EngineConfig
from core.errors import UsageError
from tests.engine.lora.folders import ATTENTION, MLP, Layers, make_layers, merged, save_adapter
from tests.recording import acme
from tests.support import cpu, refused

CPU = torch.device("cpu")
NAMES = ("attention", "mlp", "all", "stable")
CONFIG = EngineConfig(
    max_num_seqs=5,
    max_model_len=48,
    block_size=4,
    decode_buckets=(5,),
    prefill_buckets=(16,),
    sampling=("greedy",),
    max_loras=4,
    max_lora_rank=8,
    options=CompileOptions(lowering="inline", strict=True),
)
OFF = replace(CONFIG, options=CompileOptions(mode="off"))
GREEDY = SamplingParams(max_new_tokens=6, ignore_eos=True)
LONG = [3 + 5 * place % 150 for place in range(30)]
"""Longer than a step that holds prompts: it is computed in chunks, beside others that generate."""
PROMPTS = [LONG, [5, 6, 7], LONG[:20], [9, 10, 11, 12], [40, 41]]
WHO = [*NAMES, None]


@dataclass
class Setting:
    """An engine with four adapters of different ranks and layers."""

    engine: Engine
    layers: dict[str, tuple[Layers, float]]

    def reference(self, name: str | None, dtype: torch.dtype) -> Any:
        """The model with an adapter merged in."""
        layers, scale = self.layers[name] if name is not None else ({}, 1.0)
        with implementation(self.engine.loaded.model, self.engine.native_attention):
            return merged(self.engine.loaded.model, layers, scale, dtype)

    def verdict(self, completion: Completion, name: str | None) -> Verdict:
        """T1 of the logits of an answer, as those of the model with this adapter merged in."""
        given = [completion.prompt_token_ids], [completion.token_ids]
        (eager,) = forward_logits_of(self.reference(name, self.engine.loaded.dtype), *given)
        (exact,) = fp64_logits(self.reference(name, torch.float64), *given, self.engine.native_attention)
        assert completion.logits is not None
        return judge(completion.logits, eager, exact)


def tiny(family: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> LoadedModel:
    return build_model(tiny_config(family, **changes), torch_device=CPU, dtype=dtype)


def load_four(engine: Engine, folder: Path) -> dict[str, tuple[Layers, float]]:
    made = {"attention": (ATTENTION, 4), "mlp": (MLP, 8), "all": (ATTENTION + MLP, 2), "stable": (("q_proj",), 8)}
    found: dict[str, tuple[Layers, float]] = {}
    for seed, (name, (targets, rank)) in enumerate(made.items()):
        layers = make_layers(engine.loaded.model, targets, rank=rank, seed=seed)
        stable = name == "stable"
        save_adapter(folder / name, layers, rank=rank, alpha=2 * rank, use_rslora=stable)
        engine.load_lora(name, folder / name)
        found[name] = layers, 2 * rank**0.5 if stable else 2.0
    return found


SETTINGS: dict[str, tuple[str, torch.dtype, bool, EngineConfig]] = {
    "llama-fp32-recorded": ("llama", torch.float32, True, CONFIG),
    "llama-bf16-recorded": ("llama", torch.bfloat16, True, CONFIG),
    "qwen3-fp32-cpu": ("qwen3", torch.float32, False, CONFIG),
    "qwen3-bf16-off": ("qwen3", torch.bfloat16, False, OFF),
}


QUICK = ("llama-fp32-recorded", "qwen3-bf16-off")
"""With graphs and without; whoever traces and compiles the others is slow."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SETTINGS],
)
def setting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    family, dtype, recorded, config = SETTINGS[request.param]
    device: Device = acme() if recorded else cpu()
    with Engine(tiny(family, dtype), device, config) as engine:
        yield Setting(engine, load_four(engine, tmp_path_factory.mktemp("adapters")))


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Setting]:
    """A model that runs eagerly, for what has nothing to do with graphs."""
    with Engine(tiny(), cpu(), OFF) as engine:
        yield Setting(engine, load_four(engine, tmp_path))


@pytest.mark.cases(1)
def test_four_adapters_and_none_in_one_batch_each_as_if_merged(setting: Setting) -> None:
    found = setting.engine.generate(PROMPTS, GREEDY, lora=WHO, collect_logits=True)
    for completion, name in zip(found, WHO, strict=True):
        verdict = setting.verdict(completion, name)
        assert verdict.passed, f"{name}: {verdict}"
        assert not setting.verdict(completion, "attention" if name is None else None).passed  # it makes a difference
    assert not any("in place of" in each for each in setting.engine.report().stand_ins)
    modes, replays = setting.engine.report().modes, setting.engine.report().replays
    if modes["decode"] != "off":
        assert {key.phase for key in replays if dict(key.guards)["lora"]} == {"decode", "prefill"}


def test_without_adapters_the_graphs_without_them_run(setting: Setting) -> None:
    def with_lora() -> int:
        return sum(n for key, n in setting.engine.report().replays.items() if dict(key.guards)["lora"])

    before = with_lora()
    setting.engine.generate(PROMPTS[:2], GREEDY)
    assert with_lora() == before


@pytest.mark.cases(1)
def test_requests_join_and_leave_and_each_keeps_its_adapter(setting: Setting) -> None:
    engine = setting.engine
    alone = [
        engine.generate([prompt], GREEDY, lora=name)[0].token_ids for prompt, name in zip(PROMPTS, WHO, strict=True)
    ]
    ids, found, waiting = {}, {}, list(zip(PROMPTS, WHO, strict=True))
    while waiting or engine.has_unfinished:
        if waiting:
            prompt, name = waiting.pop(0)
            ids[engine.add_request(prompt, GREEDY, lora=name)] = len(ids)
        for output in engine.step():
            if output.completion is not None:
                found[ids[output.request_id]] = output.completion.token_ids
    assert [found[index] for index in range(len(PROMPTS))] == alone


@pytest.mark.cases(1)
def test_a_reloaded_adapter_gives_its_new_numbers_and_finds_no_old_cache(setting: Setting, tmp_path: Path) -> None:
    engine = setting.engine
    first = engine.generate([LONG], GREEDY, lora="all")[0]
    again = engine.generate([LONG], GREEDY, lora="all")[0]
    assert again.num_cached_tokens >= 24 and again.token_ids == first.token_ids
    before = setting.layers["all"]
    try:
        engine.unload_lora("all")
        layers = make_layers(engine.loaded.model, ATTENTION + MLP, rank=3, seed=99)
        engine.load_lora("all", save_adapter(tmp_path / "other", layers, rank=3, alpha=3))
        setting.layers["all"] = layers, 1.0
        other = engine.generate([LONG], GREEDY, lora="all", collect_logits=True)[0]
        assert other.num_cached_tokens == 0
        assert setting.verdict(other, "all").passed
    finally:
        setting.layers["all"] = before
        engine.unload_lora("all")
        engine.load_lora("all", save_adapter(tmp_path / "all", before[0], rank=2, alpha=4))
    assert engine.generate([LONG], GREEDY, lora="all")[0].token_ids == first.token_ids


def test_adapters_share_no_cache_and_requests_of_one_do(plain: Setting) -> None:
    ran = [plain.engine.generate([LONG], GREEDY, lora=name)[0] for name in ("mlp", "all", None, "mlp", None)]
    assert [each.num_cached_tokens > 0 for each in ran] == [False, False, False, True, True]


@pytest.mark.slow
def test_preempted_sequences_keep_their_adapters(tmp_path: Path) -> None:
    with Engine(tiny(), cpu(), replace(OFF, cache_tokens=56)) as engine:
        load_four(engine, tmp_path)
        pairs = [(prompt[:20], name) for prompt, name in zip(PROMPTS, WHO, strict=True)]
        params = replace(GREEDY, max_new_tokens=16)
        alone = [engine.generate([prompt], params, lora=name)[0].token_ids for prompt, name in pairs]
        together = engine.generate([prompt for prompt, _ in pairs], params, lora=WHO)
        assert engine.stats().preempted > 0
        assert [each.token_ids for each in together] == alone


@pytest.mark.slow
@pytest.mark.parametrize("recorded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_drafts_from_own_text_change_no_token(plain: Setting, tmp_path: Path, recorded: bool) -> None:
    prompts, params = [[7, 8, 9, 10] * 5 for _ in WHO], replace(GREEDY, max_new_tokens=16)
    expected = [each.token_ids for each in plain.engine.generate(prompts, params, lora=WHO)]
    device, config = (acme(), CONFIG) if recorded else (cpu(), OFF)
    with Engine(tiny(), device, replace(config, speculative=2)) as engine:
        load_four(engine, tmp_path / "again")
        assert [each.token_ids for each in engine.generate(prompts, params, lora=WHO)] == expected
        assert engine.stats().drafted["ngram"] > 0
        replayed = {key.phase for key in engine.report().replays if dict(key.guards)["lora"]}
        assert ("verify" in replayed) == recorded


def test_the_models_own_weights_load_and_adapters_stay(plain: Setting) -> None:
    engine, model = plain.engine, plain.engine.loaded.model
    before = engine.generate([LONG], GREEDY, lora="all")[0].token_ids
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert state.keys() == tiny().model.state_dict().keys()
    engine.load_weights(state)
    again = engine.generate([LONG], GREEDY, lora="all")[0]
    assert (again.num_cached_tokens, again.token_ids) == (0, before)
    engine.close()
    assert not any("forward" in vars(module) or "_core_lora" in vars(module) for module in model.modules())


@pytest.mark.slow
def test_linears_and_adapters_are_merged_and_gates_are_fused_as_without() -> None:
    options = CompileOptions(lowering="inline", enable_passes=("merge_linears",))
    counts = []
    both = replace(CONFIG, options=options, decode_buckets=(2, 5))  # of one trace each
    for config in (replace(both, max_loras=0), both):
        with Engine(tiny(num_hidden_layers=1), cpu(), config) as engine:
            traces = [trace for trace in engine.report().traces if trace.phase == "decode"]
            counts.append([{each.name: each.matched for each in trace.passes} for trace in traces])
            keys = {name for key in engine._runner.program.keys for name, _ in key.guards}
            assert ("lora" in keys) == bool(config.max_loras)
            inputs = engine._runner.program.inputs(engine._runner.program.keys[0])
            assert ("adapter_slots" in inputs) == bool(config.max_loras)
    ((own,), (without, beside)) = counts
    assert without == own
    assert own["merge_linears"] == own["fuse_gate_up"] * 2 == 2
    assert {name: beside[name] - own[name] for name in own if own[name] != beside[name]} == {"merge_lora": 2}


@torch.no_grad()
def test_quantised_layers_have_adapters_too(tmp_path: Path) -> None:
    from core.quantization.quantize import quantize

    loaded = tiny()
    layers = make_layers(loaded.model, ATTENTION + MLP, rank=4, seed=1)
    folder = save_adapter(tmp_path / "a", layers, rank=4, alpha=4)
    quantize(loaded.model, "w8a16")
    hooks = [
        loaded.model.get_submodule(path).register_forward_hook(lambda _, x, y, a=down, b=up: y + x[0] @ a.T @ b.T)
        for path, (down, up) in layers.items()
    ]
    expected = loaded.model(input_ids=torch.tensor([LONG]), use_cache=False).logits[0, -1]
    for hook in hooks:
        hook.remove()
    with Engine(loaded, cpu(), OFF) as engine:
        engine.load_lora("a", folder)
        (found,) = engine.generate([LONG], replace(GREEDY, max_new_tokens=1), lora="a", collect_logits=True)
    assert found.logits is not None
    torch.testing.assert_close(found.logits[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_of_a_mixture_the_layers_of_all_tokens_have_adapters(tmp_path: Path) -> None:
    with Engine(tiny("qwen3_moe"), cpu(), OFF) as engine:
        layers = make_layers(engine.loaded.model, ATTENTION, rank=4, seed=3)
        assert engine._runner.adapters is not None and engine._runner.adapters.layers.keys() == layers.keys()
        engine.load_lora("a", save_adapter(tmp_path / "a", layers, rank=4, alpha=8))
        (found,) = engine.generate([LONG], GREEDY, lora="a", collect_logits=True)
        setting = Setting(engine, {"a": (layers, 2.0)})
        assert setting.verdict(found, "a").passed and not setting.verdict(found, None).passed


def test_what_is_not_loaded_or_in_use_is_refused(plain: Setting, tmp_path: Path) -> None:
    engine, folder = plain.engine, plain.engine.loras["mlp"].path
    with refused(UsageError, "lora='ml'", "'attention', 'mlp'", "did you mean 'mlp'?"):
        engine.generate([LONG, LONG], GREEDY, lora=["mlp", "ml"])
    assert not engine.has_unfinished
    with refused(UsageError, "2 adapters are named"):
        engine.generate([LONG], GREEDY, lora=["mlp", "all"])
    with refused(UsageError, "all 4 slots are taken", "unload one"):
        engine.load_lora("fifth", folder)
    with refused(UsageError, "'mlp' is loaded already"):
        engine.load_lora("mlp", folder)
    request = engine.add_request(LONG, GREEDY, lora="mlp")
    with refused(UsageError, "unload_lora('mlp')", "unfinished requests use it"):
        engine.unload_lora("mlp")
    engine.abort(request)
    engine.unload_lora("mlp")
    assert list(engine.loras) == ["attention", "all", "stable"]
    with refused(UsageError, "unload_lora('mlp')", "loaded are"):
        engine.unload_lora("mlp")
    engine.close()
    with refused(UsageError, "the engine is closed"):
        engine.load_lora("mlp", folder)


def test_where_there_are_no_adapters_they_are_refused(tmp_path: Path) -> None:
    with Engine(tiny(), cpu(), replace(OFF, max_loras=0)) as engine:
        with refused(UsageError, "without room for adapters", "max_loras=1"):
            engine.generate([LONG], GREEDY, lora="x")
        with refused(UsageError, "without room for adapters"):
            engine.load_lora("x", tmp_path)
    with refused(UsageError, "max_loras=4", "can't run on the paged cache"):
        Engine(tiny("codegen"), cpu(), OFF)
    with refused(UsageError, "max_loras=4", "cut among 2 ranks"):
        make_engine(tiny(), cpu(), OFF, Rank(index=0, size=2))
    with refused(UsageError, "max_loras=4", "draft model"):
        replace(OFF, speculative=1, draft_model="folder")
    with refused(UsageError, "max_loras=-1"):
        replace(OFF, max_loras=-1)


def test_a_model_whose_layers_no_forward_without_a_cache_tells_is_refused() -> None:
    """The indexers of DeepSeek V3.2 ask for a cache."""
    loaded = build_model(tiny_config("deepseek_v32"), torch_device=torch.device("cpu"), dtype=torch.float32)
    with refused(UsageError, "max_loras=4", "which tells its linear layers, fails"):
        Engine(loaded, cpu(), OFF)

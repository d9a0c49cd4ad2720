"""Loading: every supported shape of folder, the progress it reports, tokenizers, and models with random weights."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")
tokenizers = pytest.importorskip("tokenizers", reason="needs the extra 'hf'")

from core.engine.models.loading import build_model, load_model  # noqa: E402
from core.errors import ModelError, UsageError  # noqa: E402
from core.host.distributions.installing import pip_install  # noqa: E402
from tests.engine.models.folders import (  # noqa: E402
    CPU,
    LLAMA,
    SIZES,
    edit_json,
    error_of,
    family,
    load,
    logits_of,
    make_llama,
)


def test_a_loaded_model_is_the_saved_one_and_ready_to_serve(pristine: Path) -> None:
    loaded = load(pristine, dtype=None)
    assert torch.equal(logits_of(loaded.model), logits_of(make_llama().eval()))
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.num_parameters == sum(p.numel() for p in loaded.model.parameters())
    assert (loaded.path, loaded.dtype, loaded.max_position, loaded.vocab_size) == (pristine, torch.float32, 64, 128)
    assert loaded.stop_token_ids == (2,)
    assert loaded.warnings == ()
    assert loaded.load_time_s > 0
    assert loaded.require_tokenizer().decode(loaded.tokenizer("Hi there")["input_ids"]) == "Hi there"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        (torch.bfloat16, None, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16),
    ],
)
def test_the_dtype_is_the_asked_one_else_the_stored_one(
    tmp_path: Path, stored: torch.dtype, asked: torch.dtype | None, expected: torch.dtype
) -> None:
    make_llama().to(stored).save_pretrained(tmp_path)
    loaded = load(tmp_path, dtype=asked)
    assert loaded.dtype == expected
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {expected}
    # Rotary frequencies stay in fp32 whatever the dtype of the weights.
    assert {b.dtype for name, b in loaded.model.named_buffers() if "inv_freq" in name} == {torch.float32}


def test_without_any_stated_dtype_the_weights_are_fp32(tmp_path: Path) -> None:
    make_llama().to(torch.bfloat16).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", dtype=None)
    assert load(tmp_path).dtype == torch.float32


def test_a_dtype_that_is_not_floating_is_a_usage_error(pristine: Path) -> None:
    with pytest.raises(UsageError, match=r"torch\.int8"):
        load(pristine, dtype=torch.int8)


def test_shards_load_as_one_file_does(tmp_path: Path) -> None:
    make_llama().save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(logits_of(load(tmp_path).model), logits_of(make_llama().eval()))


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", ["llama-tied", "qwen3", "gemma2", "gpt2", "gpt_neox", "mixtral", "mamba"])
def test_other_architectures_survive_the_round_trip(name: str, tmp_path: Path) -> None:
    built = build_model(family(name), torch_device=CPU, dtype=torch.float32)
    built.model.save_pretrained(tmp_path)  # type: ignore[operator]
    loaded = load(tmp_path)
    assert torch.equal(logits_of(loaded.model), logits_of(built.model))
    assert loaded.num_parameters == built.num_parameters
    assert loaded.max_position == (None if name == "mamba" else 64)


def test_progress_counts_files_then_tensors(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_llama().save_pretrained(tmp_path, max_shard_size="20KB")
    capfd.readouterr()
    calls: list[tuple[str, int, int]] = []
    loaded = load(tmp_path, progress=lambda stage, done, total: calls.append((stage, done, total)))
    num_files, num_tensors = len(list(tmp_path.glob("*.safetensors"))), len(loaded.model.state_dict())
    assert calls == [
        *[("check files", done, num_files) for done in range(num_files + 1)],
        *[("load weights", done, num_tensors) for done in range(num_tensors + 1)],
    ]
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", ""), "the library's own bar or log reached the terminal"


def test_moving_to_a_device_is_reported_and_done(pristine: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    # The meta device stands for any other than the host.
    loaded = load_model(pristine, torch_device=torch.device("meta"), progress=lambda *call: stages.append(call))
    assert stages[-2:] == [("move to device", 0, 1), ("move to device", 1, 1)]
    assert {parameter.device.type for parameter in loaded.model.parameters()} == {"meta"}


def test_a_device_copies_weights_in_its_own_way(pristine: Path) -> None:
    given: list[torch.Tensor] = []

    def copy_in(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        given.extend(tensors)
        return [each.to("meta") for each in tensors]

    loaded = load_model(pristine, torch_device=torch.device("meta"), copy_in=copy_in)
    parameters = list(loaded.model.parameters())
    assert [each.shape for each in given] == [each.shape for each in parameters]
    assert {each.device.type for each in given} == {"cpu"} and {each.device.type for each in parameters} == {"meta"}


def test_a_device_that_is_too_small_is_an_error_with_the_size(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 8 GiB")

    monkeypatch.setattr(torch.nn.Module, "to", full)
    with pytest.raises(ModelError, match=r"the weights take 0\.00 GiB, too much for meta: .*8 GiB"):
        load_model(pristine, torch_device=torch.device("meta"))


def test_the_library_is_left_as_it_was(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    logger, bars = logging.getLogger("transformers"), transformers.utils.logging
    before = (logger.handlers[:], logger.level, logger.propagate, bars._tqdm_hook)
    load(pristine)
    edit = pristine.parent / "absent"
    error_of(edit)
    assert (logger.handlers, logger.level, logger.propagate, bars._tqdm_hook) == before
    assert constants.HF_HUB_OFFLINE is False


def test_nothing_touches_the_network(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError(f"a connection was opened: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert load(pristine).tokenizer is not None


def test_stop_ids_come_from_the_generation_config_first(folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=[7, 9])
    assert load(folder).stop_token_ids == (7, 9)
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", eos_token_id=5)
    assert load(folder).stop_token_ids == (5,)


def test_without_tokenizer_files_token_ids_still_work(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    loaded = load(folder)
    assert loaded.tokenizer is None
    assert loaded.warnings == ("no tokenizer: the folder has no tokenizer files (tokenizer.json or a vocabulary)",)
    with pytest.raises(ModelError, match="no tokenizer files") as caught:
        loaded.require_tokenizer()
    assert "lists of token ids" in caught.value.remedy


def test_a_tokenizer_configuration_alone_is_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    edit_json(folder / "tokenizer_config.json", tokenizer_class="LlamaTokenizer")
    assert load(folder).tokenizer is None


def test_a_broken_tokenizer_is_reported_when_text_is_used(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{broken")
    loaded = load(folder)
    assert "could not load the tokenizer" in loaded.warnings[0]
    with pytest.raises(ModelError, match="could not load the tokenizer"):
        loaded.require_tokenizer()


def test_without_transformers_the_extra_is_named(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError) as caught:
        load(pristine)
    assert caught.value.remedy == pip_install("hf")
    assert caught.value.__suppress_context__


def test_a_built_model_follows_its_seed_and_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    first, again, other = (make_llama(seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("name", ["llama-tied", "gemma2", "gpt2", "gpt_neox"])
def test_a_built_model_has_no_constant_weight(name: str) -> None:
    built = build_model(family(name), torch_device=CPU, dtype=torch.bfloat16)
    for parameter_name, parameter in built.model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert len(set(parameter.flatten().tolist())) > 8, parameter_name


def test_a_built_model_is_complete_but_for_the_tokenizer() -> None:
    config = transformers.LlamaConfig(**LLAMA)
    before = config.to_dict()
    built = build_model(config, torch_device=CPU, dtype=torch.bfloat16, seed=3)
    assert config.to_dict() == before, "the configuration was changed"
    assert not built.model.training
    assert (built.path, built.dtype, built.max_position, built.stop_token_ids) == (None, torch.bfloat16, 64, (2,))
    with pytest.raises(ModelError, match="random weights has no tokenizer"):
        built.require_tokenizer()


def test_a_model_is_built_from_a_config_file(pristine: Path) -> None:
    from_folder = build_model(pristine, torch_device=CPU)
    from_file = build_model(str(pristine / "config.json"), torch_device=CPU)
    assert torch.equal(logits_of(from_folder.model), logits_of(from_file.model))
    with pytest.raises(ModelError, match="no such file"):
        build_model(pristine / "absent.json", torch_device=CPU)


def test_building_refuses_what_loading_refuses() -> None:
    with pytest.raises(ModelError, match="is an encoder"):
        build_model(transformers.BertConfig(**SIZES), torch_device=CPU)
    with pytest.raises(UsageError, match=r"torch\.int64"):
        build_model(transformers.LlamaConfig(**LLAMA), torch_device=CPU, dtype=torch.int64)


def test_an_installed_backend_that_cannot_load_is_what_is_told(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers imports the backends that it finds, whatever the device is."""

    def broken(*_: object, **__: object) -> None:
        raise ImportError("libhccl.so: cannot open shared object file")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", broken)
    error = error_of(pristine)
    assert "libhccl.so: cannot open" in error.found and "config.json" not in str(error)
    assert "uninstall it" in error.remedy
    monkeypatch.undo()
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", broken)
    config = transformers.AutoConfig.from_pretrained(pristine)
    with pytest.raises(ModelError, match="cannot open shared object"):
        build_model(config, torch_device=CPU, dtype=torch.float32)

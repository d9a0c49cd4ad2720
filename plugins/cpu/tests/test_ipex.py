"""intel-extension-for-pytorch itself, in an environment that has it (make test-ipex)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import core
from core.bench.peers.requirements import lacking
from core.common.fakes import apply_fakes
from core.common.fakes.schema import find_overload
from core.common.ops.implementation import OpCall
from core.common.ops.norm.norms import RMS_NORM
from core.common.peers import PeerWork
from core.errors import ModelError
from core.verify.fakes.parity import compare
from core_cpu.fakes import TORCH_IPEX
from core_cpu.ipex import norm, presence
from core_cpu.peers import PEERS, ipex_llm
from core_cpu.peers.static import load
from tests.kernel_cases import check

pytestmark = [
    pytest.mark.ipex,
    pytest.mark.skipif(bool(presence.why_not()), reason=presence.why_not() or "it is here"),
]
CPU = torch.device("cpu")
LACKING = ", ".join(lacking(next(peer for peer in PEERS if peer.name == "ipex.llm").requires))
needs_transformers = pytest.mark.skipif(bool(LACKING), reason=LACKING or "it is here")
PROMPT, STEPS, VOCABULARY = 7, 5, 160


class Norm(nn.Module):
    """Weights in fp32 up to the end, as the kernel has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (self.weight.float() * wide).to(x.dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = Norm(64), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = x + self.down(functional.silu(self.up(self.norm(x))))
        return hidden


def takes(call: dict[str, Any]) -> bool:
    given = {argument.name: argument.default_value for argument in RMS_NORM.overload._schema.arguments} | call
    return norm.why_not_norm(OpCall(op="core::rms_norm", args=given)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_is_the_canonical_one(dtype: torch.dtype) -> None:
    calls = [sample.kwargs for sample in RMS_NORM.samples(dtype, CPU)]
    taken = [call for call in calls if takes(call)]
    assert 0 < len(taken) < len(calls)
    presence.load()
    check(RMS_NORM, norm.rms_norm, taken, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lowering", ["ipex", "inductor", "inline"])
def test_a_program_with_its_norm_gives_what_the_model_gives(lowering: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Block().to(dtype).eval().requires_grad_(False)
    program = core.compile(
        model,
        "cpu",
        inputs={"x": core.InputSpec(("rows", 64), dtype)},
        buckets=[4],
        lowering=lowering,
        options=core.CompileOptions(providers={"core::rms_norm": "ipex_rms_norm"}),
    )
    choices = [each for trace in program.report().traces for each in trace.ops]
    (used,) = {each.implementation for each in choices if each.op == "core::rms_norm"}
    assert used == "ipex_rms_norm"
    x = torch.randn(3, 64, dtype=dtype)
    truth = model.double()(x.double())
    given, plain = program(x=x), model.to(dtype)(x)
    assert (given - truth).abs().max() <= 2 * (plain - truth).abs().max() + torch.finfo(dtype).eps


def test_the_fakes_agree_with_the_kernels() -> None:
    presence.load()
    results = dict(apply_fakes(TORCH_IPEX))
    for fake in TORCH_IPEX:
        assert results[fake].applied, (fake.op, results[fake].reason)
        op = find_overload(fake.op)
        assert op is not None and fake.samples is not None
        for sample in fake.samples(CPU):
            undeclared = ["writes its argument 'input1', which the schema does not declare"]
            wanted = undeclared if sample.name == "sum kept" else []
            assert compare(op, sample.kwargs) == wanted, (fake.op, sample.name)


def work(folder: Path, phase: Any, dtype: str = "float32") -> PeerWork:
    prompts = [
        [(11 * row + 3 * at) % VOCABULARY for at in range(PROMPT)] for row in range(2 if phase == "decode" else 1)
    ]
    return PeerWork(folder=folder, dtype=dtype, threads=1, phase=phase, prompts=prompts, limit=PROMPT + 2 + 2 * STEPS)


def saved(folder: Path, name: str, **more: Any) -> Path:
    """Write a model of two layers with random weights in bf16, which fp32 holds too."""
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
    config = getattr(transformers, name)(**sizes, initializer_range=0.3, **more)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config, torch_dtype=torch.bfloat16)
        for parameter in model.parameters():
            if parameter.dim() < 2:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)  # a norm that is left out shows
    model.save_pretrained(folder)
    return folder


def expected(asked: PeerWork, count: int) -> list[list[int]]:
    """Return the greedy tokens of whole forwards, without any cache."""
    model, ids = load(asked), torch.tensor(asked.prompts)
    with torch.no_grad():
        for _ in range(count):
            new: Tensor = model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, new], 1)
    found: list[list[int]] = ids[:, PROMPT:].tolist()
    return found


@needs_transformers
@pytest.mark.parametrize("name", ["LlamaConfig", "Qwen3Config"])
def test_its_graph_gives_the_tokens_of_whole_forwards(tmp_path: Path, name: str) -> None:
    asked = work(saved(tmp_path, name), "decode")
    right = expected(asked, 2 + 2 * STEPS)
    runner = ipex_llm.traced(asked)
    rows = [list(row) for row in runner.tokens]
    for _ in range(2):
        for row, new in zip(rows, runner.run(STEPS), strict=True):
            row += new
    assert rows == right
    asked = work(tmp_path, "prefill")
    (first,) = expected(asked, 1)
    runner = ipex_llm.traced(asked)
    assert runner.tokens == [first] and runner.run(3) == [first * 3]


@needs_transformers
def test_a_token_that_ends_a_text_ends_no_measurement(tmp_path: Path) -> None:
    saved(tmp_path, "LlamaConfig")
    right = expected(work(tmp_path, "decode"), 2 + STEPS)
    saved(tmp_path, "LlamaConfig", eos_token_id=right[0][1])
    runner = ipex_llm.traced(work(tmp_path, "decode"))
    found = [first + new for first, new in zip(runner.tokens, runner.run(STEPS), strict=True)]
    assert found == right


@needs_transformers
def test_weights_are_read_in_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    saved(tmp_path, "LlamaConfig")
    for dtype in ("bfloat16", "float32"):
        parameters = load(work(tmp_path, "decode", dtype)).parameters()
        assert {parameter.dtype for parameter in parameters} == {getattr(torch, dtype)}
    runner = ipex_llm.traced(work(tmp_path, "decode", "bfloat16"))
    assert {parameter.dtype for parameter in runner.keeps.parameters()} == {torch.bfloat16}


@needs_transformers
def test_a_model_that_it_has_no_graph_of_is_refused(tmp_path: Path) -> None:
    import transformers

    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=VOCABULARY, n_positions=64)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no graph of GPT2LMHeadModel"):
        ipex_llm.traced(work(tmp_path, "decode"))

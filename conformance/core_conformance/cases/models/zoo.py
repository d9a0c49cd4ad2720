"""The models of area "models": which ones, what each adds, and how they are built, run and referred to."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from core.device import Device
    from core.engine.models.loading import LoadedModel
    from core.engine.steps.runner import EngineConfig

NUM_TOKENS = 12
"""Generated after each prompt: a few more than the tiny models' window of 8, so that each leaves it behind."""
PROMPT_LENGTHS = (1, 8, 17, 34)
"""One token, a whole cache block, one more than two of them, and what takes three steps of the prefill bucket."""
BLOCK_SIZE, PREFILL, MAX_LEN = 8, 16, 64
TEXT = """Return a list of the names in the module. If the argument is a string, return it. The interpreter reads a file
and runs it, line by line; a class has methods, and each method has arguments. If the argument is None, raise an error
that says so. Numbers are added, strings are joined, and lists may hold both of them."""

_RMS = ("lift_rms_norm", "lift_rotary", "fuse_add_rms_norm")
_GATED = (*_RMS, "lift_gated_activation")
ALL_FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """One model."""

    name: str
    #: The property that no other model covers.
    adds: str
    #: Passes that have to fire on it.
    lifts: tuple[str, ...]
    #: The model type; None for the trained model.
    model_type: str | None = None
    #: Fields of the tiny configuration of that type.
    changes: tuple[tuple[str, Any], ...] = ()
    #: The dtypes in which it runs. A router in half precision may send a token elsewhere by rounding alone, so mixtures
    #: of experts are judged in fp32 only.
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    #: The engine's cache.
    route: str = "paged"
    #: Whether its layers keep states, so that no beginning is shared.
    recurrent: bool = False
    #: Whether its logits are judged in every mode that the device declares.
    modes: bool = False
    #: Whether determinism is tried on a second engine too, in fp32.
    second: bool = False

    def lowering(self, dtype: str) -> str | None:
        """Return the lowering by name, None for the device's default: compiling all of them would take too long."""
        return None if self.model_type is None and dtype == "float32" else "inline"


SUBJECTS: tuple[Subject, ...] = (
    Subject(
        name="trained", adds="trained weights and text, four layers", lifts=_GATED, model_type=None, dtypes=ALL_FLOATS
    ),
    Subject(
        name="qwen3",
        model_type="qwen3",
        adds="normed queries and keys, a window in one layer",
        lifts=(*_GATED, "fuse_qk_norm_rotary"),
        second=True,
    ),
    Subject(
        name="gemma2",
        model_type="gemma2",
        # Eager, since SDPA of transformers 5.17 leaves the soft cap out: a yardstick of another function.
        changes=(("hidden_size", 72), ("attn_implementation", "eager")),
        adds="rows that no power of two divides, soft caps, norm weights with an offset, GELU in its tanh form",
        lifts=_GATED,
    ),
    Subject(
        name="phi3",
        model_type="phi3",
        changes=(("hidden_act", "gelu"),),
        adds="merged projections and gates, GELU by its definition",
        lifts=_GATED,
        dtypes=("float32",),
    ),
    Subject(
        name="gpt_neox",
        model_type="gpt_neox",
        adds="layer norm, biases, rotation of a part of each head, parallel branches",
        lifts=("lift_layer_norm", "lift_rotary"),
        dtypes=("float32",),
    ),
    Subject(
        name="gpt_oss",
        model_type="gpt_oss",
        adds="experts behind a router, attention sinks",
        lifts=(*_RMS, "lift_moe_route", "lift_grouped_mlp"),
        dtypes=("float32",),
    ),
    Subject(
        name="falcon_h1",
        model_type="falcon_h1",
        adds="recurrent states in slots, of a convolution and of a state space, beside attention in one layer",
        lifts=("lift_rms_norm", "lift_rotary", "lift_causal_conv1d", "lift_selective_state_update"),
        dtypes=("float32",),
        recurrent=True,
    ),
    Subject(
        name="deepseek_v32",
        model_type="deepseek_v32",
        adds="an indexer that leaves 8 positions, of up to 46 that there are; latent attention",
        lifts=("lift_rms_norm", "lift_moe_route", "lift_grouped_mlp"),
        dtypes=("float32",),
        modes=True,
    ),
    Subject(
        name="falcon",
        model_type="falcon",
        adds="attention of its own on transformers' static cache",
        lifts=("lift_layer_norm", "lift_rotary", "lift_attention"),
        dtypes=("float32",),
        route="static",
    ),
)


def build(subject: Subject, device: Device, dtype: torch.dtype, seed: int) -> LoadedModel:
    """Return a fresh model on the device; the same subject, dtype and seed give the same weights."""
    from core.engine.models.assets import embedded_model
    from core.engine.models.loading import build_model, load_model
    from core.engine.models.tiny import tiny_config

    if subject.model_type is None:
        return load_model(embedded_model(), torch_device=device.torch_device, dtype=dtype)
    # Constant parameters, norm weights first of all, are perturbed: 1 would hide a step left out.
    return build_model(
        tiny_config(subject.model_type, **dict(subject.changes)),
        torch_device=device.torch_device,
        dtype=dtype,
        seed=seed,
    )


def prompts_for(loaded: LoadedModel, seed: int) -> list[list[int]]:
    """Return one prompt of each length: pieces of a text where the model has a tokenizer, else random tokens."""
    rng = random.Random(seed)
    if loaded.tokenizer is not None:
        tokens = list(loaded.tokenizer(TEXT)["input_ids"])
        starts = [rng.randrange(len(tokens) - length) for length in PROMPT_LENGTHS]
        return [tokens[start : start + length] for start, length in zip(starts, PROMPT_LENGTHS, strict=True)]
    return [[rng.randrange(3, loaded.vocab_size) for _ in range(length)] for length in PROMPT_LENGTHS]


def engine_config(subject: Subject, dtype: str, device: Device, **changes: Any) -> EngineConfig:
    """Return how an engine runs the subject: few buckets, of which steps fill some and pad others.

    changes: to the options of its compile.
    """
    from core.compilation.options import CompileOptions
    from core.engine.steps.runner import EngineConfig

    decode_buckets: tuple[int, ...] = (2, 4)
    options = CompileOptions(lowering=subject.lowering(dtype))
    if options.lowering is None and device.lowerings.default != "inline":
        # Each bucket costs the compiler half a minute: one of decode shows what it does to a whole model.
        decode = EngineConfig().modes_of("decode", device.capabilities)[0]
        options, decode_buckets = replace(options, mode={"decode": decode, "prefill": "off"}), (4,)
    return EngineConfig(
        max_num_seqs=4,
        max_model_len=MAX_LEN,
        block_size=BLOCK_SIZE,
        decode_buckets=decode_buckets,
        prefill_buckets=(PREFILL,),
        sampling=("greedy",),
        options=replace(options, **changes),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """Greedy generation by transformers' own eager model, for each prompt."""

    #: The tokens that it chose.
    paths: list[list[int]]
    #: The logits that it chose them from, (NUM_TOKENS, V).
    eager: list[Tensor]
    #: The fp64 logits after the same tokens.
    exact: list[Tensor]
    #: Eager logits on the host.
    host: list[Tensor]


@torch.no_grad()
def refer(loaded: LoadedModel, device: Device, prompts: Sequence[Sequence[int]], num_rows: int) -> Reference:
    """Generate with nothing of the engine, each prompt by itself, attention spelled out in torch operators.

    num_rows: copies of the prompt to run at once, as many as the engine pads a sequence to: a product of one row may be
    summed in another order than that of several, with an error of another size.
    """
    import copy

    from core.engine.check.eager import eager_generate, fp64_logits
    from core.engine.inspect.attention import implementation
    from core.engine.inspect.probe import counts_from_zero

    model: Any = loaded.model
    # PyTorch's fused attention leaves soft caps out; and the vendor who is judged writes it, so it is no yardstick.
    spelled_out = "eager" if model._can_set_attn_implementation() else loaded.config._attn_implementation
    paths, eager = [], []
    with implementation(model, spelled_out):
        positions = counts_from_zero(model)
        for prompt in prompts:
            tokens, logits = eager_generate(model, [prompt] * num_rows, NUM_TOKENS, positions=positions)
            paths.append(tokens[0])
            eager.append(logits[0])
    host_model = copy.deepcopy(model).to("cpu")
    with implementation(host_model, spelled_out):
        host = [
            host_model(input_ids=torch.tensor([[*p, *t[:-1]]]), use_cache=False, return_dict=True).logits[
                0, len(p) - 1 :
            ]
            for p, t in zip(prompts, paths, strict=True)
        ]
    return Reference(paths=paths, eager=eager, exact=fp64_logits(model, prompts, paths, spelled_out), host=host)

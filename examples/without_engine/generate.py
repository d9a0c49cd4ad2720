"""`transformers.generate` with a compiled decode step: the model stays transformers' own, and so does the loop.

python examples/without_engine/generate.py --device cpu
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, StaticCache
from transformers.modeling_outputs import CausalLMOutputWithPast

import core


@contextmanager
def compiled_decode(
    model: PreTrainedModel, cache: StaticCache, device: core.Device, batch_size: int
) -> Iterator[core.Program]:
    """Let the model's steps of one token run as captured graphs inside the block; longer inputs run as before.

    cache: filled by `generate`, which must be given this very object. Prompts of a batch must be equally long: the
    captured step takes no mask.
    """
    own_forward = model.forward

    def decode(input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return own_forward(input_ids=input_ids, position_ids=position_ids, past_key_values=cache).logits

    # Layers allocate their cache on first use; a graph must find it there.
    with torch.no_grad():
        own_forward(input_ids=model.dummy_inputs["input_ids"][:1, :2].repeat(batch_size, 1), past_key_values=cache)
    inputs = {name: core.InputSpec((batch_size, 1), torch.int64) for name in ("input_ids", "position_ids")}
    with core.compile(decode, device, inputs=inputs, options=core.CompileOptions(reset=cache.reset)) as program:
        cache.reset()

        @wraps(own_forward)
        def forward(input_ids: Tensor | None = None, **arguments: Any) -> Any:
            if input_ids is None or input_ids.shape[1] != 1 or arguments.get("past_key_values") is not cache:
                return own_forward(input_ids=input_ids, **arguments)
            mask = arguments.get("attention_mask")
            if mask is not None and mask.dim() == 2 and not bool(mask.all()):
                raise ValueError("the captured step takes no padding: give prompts of one length")
            logits = program(input_ids=input_ids, position_ids=arguments["position_ids"])
            return CausalLMOutputWithPast(logits=logits.clone(), past_key_values=cache)

        model.forward = forward
        try:
            yield program
        finally:
            model.forward = own_forward


def main(device: str | core.Device = "auto", num_tokens: int = 16) -> dict[str, Any]:
    """Generate with and without the compiled step and return both token lists."""
    device = core.select_device(device) if isinstance(device, str) else device
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().to(device.torch_device)
    prompts = torch.tensor([[1, 5, 9, 13], [2, 6, 10, 14]], device=device.torch_device)
    options = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False, "disable_compile": True}
    expected = model.generate(prompts, **options)
    cache = StaticCache(config=config, max_cache_len=64)
    with compiled_decode(model, cache, device, batch_size=len(prompts)) as program:
        tokens = model.generate(prompts, past_key_values=cache, **options)
        report = program.report()
    equal = bool(torch.equal(tokens, expected))
    return {"tokens": tokens.tolist(), "expected": expected.tolist(), "equal": equal, "report": report}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    result = main(parser.parse_args().device)
    print(result["tokens"])
    print("equal to transformers' own:", result["equal"])

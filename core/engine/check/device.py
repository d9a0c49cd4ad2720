"""Decides whether the device is at fault if eager is far from fp64: it is if the processor computes the same well
enough."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from core.common.numerics import judge
from core.engine.check.eager import eager_generate, fp64_logits
from core.engine.inspect.attention import implementation
from core.engine.inspect.probe import counts_from_zero, function_bound, relative_difference

_SLACK = 2.0
"""Doubles T1's factor of 2: a device's error is at most four times that of the processor."""
_SHORT_PRODUCTS = 0.02
"""Devices may multiply fp32 with a mantissa of 10 bits, whatever the dtype says; through many layers that is less."""

_NUM_TOKENS = 4


@torch.no_grad()
def device_fault(
    model: Any,
    device: str,
    prompts: Sequence[Sequence[int]],
    tokens: Sequence[Sequence[int]],
    eager: Sequence[Tensor],
    exact: Sequence[Tensor],
    attention: str,
) -> str:
    """Return what shows that a device computes wrongly, "" where nothing does.

    A device is at fault if its eager logits are far from fp64, those of the processor in the same dtype are not, and
    the device's error is over four times the processor's (T1 with the processor as yardstick, its factors doubled).
    Where the processor is as far off, or can't run the model, the device is not blamed.

    - device: its name, for the text.
    - tokens: the tokens that eager chose, per prompt.
    - eager, exact: the logits (len(tokens[i]), vocabulary) on the host, by the device and in fp64.
    - attention: transformers' implementation that eager used.
    """
    bound = max(function_bound(model), _SHORT_PRODUCTS)
    off = relative_difference(torch.cat(list(eager)), torch.cat(list(exact)))
    if off <= bound:
        return ""
    host = _on_host(model, prompts, tokens, attention)
    if host is None:
        return ""
    on_host = relative_difference(torch.cat(host), torch.cat(list(exact)))
    if not on_host <= bound or judge(*map(torch.cat, (list(eager), host, list(exact))), slack=_SLACK).passed:
        return ""
    dtype = str(eager[0].dtype).removeprefix("torch.")
    return (
        f"{device} computes wrongly: eager on it differs from the fp64 forward by {off:.2g}, the same on the "
        f"processor in {dtype} by {on_host:.2g}. What else is said of model, cache and tokens follows from that"
    )


@torch.no_grad()
def probe_device(model: Any, device: str, prompt: Sequence[int], attention: str) -> str:
    """Return what `device_fault` finds in a short eager generation, for a model that no engine takes."""
    with implementation(model, attention):
        tokens, eager = eager_generate(model, [prompt], _NUM_TOKENS, positions=False)
    return device_fault(
        model, device, [prompt], tokens, eager, fp64_logits(model, [prompt], tokens, attention), attention
    )


def _on_host(
    model: Any, prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], attention: str
) -> list[Tensor] | None:
    """Return the logits of eager generation on the processor in the model's dtype; None where it can't run there."""
    for name in dict.fromkeys((attention, "eager")):  # kernels of attention may be the device's own
        try:
            twin = copy.deepcopy(model).to("cpu")
            with implementation(twin, name):
                positions = counts_from_zero(twin)
                pairs = zip(prompts, tokens, strict=True)
                runs = [eager_generate(twin, [p], len(t), positions=positions, given=[t]) for p, t in pairs]
        except Exception:  # layers of a device fail in their own ways elsewhere
            continue
        return [logits for _, each in runs for logits in each]
    return None

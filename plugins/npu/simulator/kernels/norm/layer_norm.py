"""Norms of torch itself that subtract a mean; root mean square norms are in rms_norm.py."""

from __future__ import annotations

import torch
from torch import Tensor

from simulator.marshal import kernel


def _wide(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()


def _layer_norm(
    x: Tensor,
    shape: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    out: Tensor,
    mean: Tensor | None,
    rstd: Tensor | None,
) -> None:
    # In float32 throughout, rounded once: weights of another dtype than x are allowed.
    result, found_mean, found_rstd = torch.native_layer_norm(x.float(), shape, _wide(weight), _wide(bias), eps)
    out.copy_(result)
    if mean is not None and mean.numel():
        mean.copy_(found_mean.view(mean.shape))
    if rstd is not None and rstd.numel():
        rstd.copy_(found_rstd.view(rstd.shape))


# The second stands for the first where torch_npu is asked for results like torch's own (use_compatible_impl).
for _name in ("aclnnLayerNorm", "aclnnFastLayerNorm"):
    kernel(_name, "TATTDTTT")(_layer_norm)


@kernel("aclnnGroupNorm", "TTTIIIIDTTT")
def _group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    batch: int,
    channels: int,
    size: int,
    groups: int,
    eps: float,
    out: Tensor,
    mean: Tensor,
    rstd: Tensor,
) -> None:
    rows = x.float().contiguous()
    found = torch.native_group_norm(rows, _wide(weight), _wide(bias), batch, channels, size, groups, eps)
    for target, result in zip((out, mean, rstd), found, strict=True):
        target.copy_(result.view(target.shape))

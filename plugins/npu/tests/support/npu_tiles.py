"""Casts into tiles and back on a device, in a process that allows private formats: torch_npu reads that once.

Prints as JSON what each op's fake says that is not so, and what did not come back as it went in.
"""

from __future__ import annotations

import json
import sys

import torch
import torch_npu
from npu_atb import run, sample
from npu_kernel_cases import npu

from core.common.fakes import apply_fakes
from core.common.fakes.schema import find_overload
from core.verify.fakes.parity import run_fake
from core_npu.fakes.declared import NPU_FAKES

TILES = 29


def problems(name: str) -> list[str]:
    """Cast one declared call's tensor by each op, compare fakes with kernels, and bring it back."""
    cast, casts_in_place = torch.ops.npu.npu_format_cast, torch.ops.npu.npu_format_cast_
    # Memory of rank 1, as a comparison makes its copies, has no tiles: torch_npu then keeps it plain.
    x = sample("npu::npu_format_cast", name)["input"].to(npu())
    tiles = cast(torch.zeros_like(x), TILES)
    found = []
    for op, call in (
        ("npu::npu_format_cast", {"input": x, "acl_format": TILES}),
        ("npu::npu_format_cast.Tensor", {"input": x, "dst": tiles}),
        ("npu::npu_format_cast_.acl_format", {"input": x.clone(), "acl_format": TILES}),
    ):
        overload = find_overload(op)
        assert overload is not None
        made = run(op, call)
        (fake,), _ = run_fake(overload, call)
        if (made.shape, made.stride(), made.dtype) != (fake.shape, fake.stride(), fake.dtype):
            found.append(f"{op}: {made.shape} {made.stride()} {made.dtype}, and its fake says {fake}")
        if (made.data_ptr() == x.data_ptr()) or (made is call["input"]) is not op.startswith("npu::npu_format_cast_"):
            found.append(f"{op}: its result is not where its schema says")
        if torch_npu.get_npu_format(made) != TILES:
            found.append(f"{op}: its result is in format {torch_npu.get_npu_format(made)}")
        if not torch.equal(made.cpu(), x.cpu()) or not torch.equal(cast(made, 2).cpu(), x.cpu()):
            found.append(f"{op}: other values come back")
    in_place = casts_in_place.acl_format(x.clone(), TILES)
    flat = torch.empty(0, dtype=x.dtype, device=x.device).set_(in_place.untyped_storage())
    if flat.numel() <= x.numel():
        found.append("tiles take no more memory than rows that do not fill them")
    return found


if __name__ == "__main__":
    torch.npu.config.allow_internal_format = True
    apply_fakes(NPU_FAKES)
    sys.stdout.write(json.dumps({name: problems(name) for name in ("rows", "codes")}))

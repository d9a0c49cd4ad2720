"""core/common/fp64.py: no spelling of a cast, and no default, makes a number narrow again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from core.common.fp64 import Fp64Mode
from core.common.numerics import Fp64Mode as Reexported
from tests.support import Norm

NARROW = torch.ones(1)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def test_it_keeps_a_norm_in_fp64() -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    module = Norm().double()
    exact = norm(x, module.weight.detach(), module.eps)
    with torch.no_grad():
        plain = module(x)
        with Fp64Mode():
            kept = module(x)
    assert kept.dtype == torch.float64
    torch.testing.assert_close(kept, exact, rtol=1e-14, atol=0)
    assert (plain - exact).abs().max() > 1e-9


@pytest.mark.parametrize(
    "narrow",
    [
        lambda x: x.float(),
        lambda x: x.half(),
        lambda x: x.bfloat16(),
        lambda x: x.to(torch.float32),
        lambda x: x.to("cpu", torch.bfloat16),
        lambda x: x.to(dtype=torch.float16),
        lambda x: x.type(torch.float32),
        lambda x: torch.softmax(x, -1, dtype=torch.float32),
        lambda x: torch.nn.functional.softmax(x, dim=-1, dtype=torch.float32),
        lambda x: x.sum(-1, dtype=torch.float32),
        lambda x: x + torch.zeros(4, dtype=torch.float32),
        lambda x: x.type("torch.FloatTensor"),
        lambda x: x.type("torch.BFloat16Tensor"),
        lambda x: x.type(torch.HalfTensor),
        lambda x: x.type(dtype=torch.float32),
        lambda x: x.type_as(NARROW),
        lambda x: x.type_as(other=NARROW),
        lambda x: x.to(NARROW),
        lambda x: x.to(tensor=NARROW, copy=True),
        lambda x: x.to(NARROW, False, True),
        lambda x: x.float(memory_format=torch.contiguous_format),
        lambda x: x.to(torch.complex64).real,
        lambda x: x.cfloat().real,
        lambda x: x.chalf().real,
        lambda x: torch.view_as_real(torch.polar(x, x).to(torch.complex64))[:, 0],
        lambda x: torch.polar(x, x).float().real,
        lambda x: torch.polar(x, x).to(NARROW).real,
        lambda x: torch.polar(x, x).type("torch.FloatTensor").real,
        lambda x: torch.mul(x, 1, out=torch.empty(4)),
        lambda x: torch.zeros(4).copy_(x),
        lambda x: torch.zeros(4).index_add_(0, torch.arange(4), x),
        lambda x: torch.tensor(x.tolist()),
        lambda x: torch.Tensor(x.tolist()),
        lambda x: torch.arange(1, 5) / 7.0,
        lambda x: torch.linspace(0.1, 0.7, 4),
        lambda x: torch.rsqrt(torch.full((4,), 3.0)),
    ],
)
def test_it_undoes_each_spelling_of_a_cast(narrow: Callable[[Tensor], Tensor]) -> None:
    x = torch.linspace(0.1, 0.7, 4, dtype=torch.float64)
    with Fp64Mode():
        result = narrow(x)
        assert result.dtype == torch.float64
        # Rounding on the way would leave a value that survives a round trip through fp32.
        assert not torch.equal(result, torch.as_tensor(result.numpy().astype("float32").astype("float64")))


def test_it_leaves_integers_and_fp64_alone() -> None:
    with Fp64Mode():
        assert torch.ones(3).to(torch.int32).dtype == torch.int32
        assert torch.zeros(3, dtype=torch.float64).dtype == torch.float64
        assert torch.ones(3).to(torch.ones(1, dtype=torch.int8)).dtype == torch.int8
        assert torch.ones(3).type("torch.LongTensor").dtype == torch.int64
        assert torch.arange(3).dtype == torch.int64
        assert torch.ones(1, dtype=torch.int32).view(torch.float32).shape == (1,)


def test_numerics_offers_the_same_mode() -> None:
    assert Reexported is Fp64Mode


def test_codes_stay_codes() -> None:
    with Fp64Mode():
        assert torch.ones(3).to(torch.float8_e4m3fn).dtype == torch.float8_e4m3fn


class Rotary(nn.Module):
    """A module with a complex constant, as rotary embeddings have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.polar(torch.ones(3), torch.ones(3)))


def test_a_complex_buffer_stays_complex() -> None:
    module = Rotary()
    before = module.get_buffer("turn").clone()
    with Fp64Mode():
        module.to("cpu", torch.float64)
    assert module.get_buffer("turn").dtype == torch.complex128
    assert torch.equal(module.get_buffer("turn"), before.to(torch.complex128))


def test_the_default_dtype_comes_back() -> None:
    mode = Fp64Mode()
    before = torch.get_default_dtype()
    with pytest.raises(ValueError), mode:
        raise ValueError
    assert torch.get_default_dtype() == before
    torch.set_default_dtype(torch.bfloat16)
    try:
        with mode, mode, Fp64Mode():
            assert torch.zeros(1).dtype == torch.float64
        assert torch.get_default_dtype() == torch.bfloat16
        assert torch.zeros(1).dtype == torch.bfloat16
    finally:
        torch.set_default_dtype(before)


def test_autocast_leaves_fp64_alone() -> None:
    x = torch.linspace(0.1, 0.7, 16, dtype=torch.float64).reshape(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16), Fp64Mode():
        around = nn.functional.linear(x.float(), torch.eye(4) / 3).softmax(-1)
    with Fp64Mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        inside = nn.functional.linear(x.float(), torch.eye(4) / 3).softmax(-1)
    for result in (around, inside):
        torch.testing.assert_close(result, (x / 3).softmax(-1), rtol=1e-14, atol=0)

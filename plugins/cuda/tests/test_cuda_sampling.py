"""core_cuda/ops/sampling/sample.py against `core::sample` in fp64: every cut, ties, masked tokens, rows of any size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.ops.sampling import SAMPLE
from tests.kernel_cases import CPU, DTYPES, faked, laid_out, moved, randn

pytest.importorskip("triton", reason="needs triton")
from core_cuda.ops.sampling import sample as sampling
from core_cuda.ops.sampling.sample import SampleConfig

# numpy's, in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero):RuntimeWarning")

HALF = (torch.bfloat16, torch.float16)
SLACK = 1e-5
SMALL = SampleConfig(part=128, part_warps=4, bins=32, listed=16, chunk=128, warps=4)
"""Few bins that hold much more than is listed, so that equal and nearly equal logits have to be told apart."""


@pytest.fixture
def device(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Yield the device; in the interpreter numpy sorts, since Triton's own sort takes seconds there for each row."""
    if kernel_device.type == "cpu":
        monkeypatch.setattr("triton.language.sort", sort)
    yield kernel_device


def sort(x: Any, dim: Any = None, descending: bool = False) -> Any:
    import numpy
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    data = numpy.sort(x.handle.data)
    return tl.tensor(TensorHandle(data[::-1].copy() if descending else data, x.handle.dtype), x.type)


def many(device: torch.device, in_interpreter: int, on_gpu: int) -> int:
    return on_gpu if device.type == "cuda" else in_interpreter


def misses(tokens: Tensor, logits: Tensor, params: Tensor) -> float:
    """Return the share of tokens that are not fp64's, each of which has to lie where a draw off by SLACK may lead."""
    logits, params = logits.double(), params.double()
    ranks = logits.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)

    def rank(chosen: Tensor) -> Tensor:
        return ranks.gather(1, chosen[:, None])[:, 0]

    def drawn(shift: float) -> Tensor:
        limits = params[:, 2] + shift * (params[:, 2] < 1)
        columns = (params[:, 0], params[:, 1], limits, (params[:, 3] + shift).clamp(0, 1))
        return rank(SAMPLE.reference(logits, torch.stack(columns, 1)))

    assert (tokens >= 0).all() and (tokens < logits.shape[1]).all()
    found = rank(tokens)
    assert ((drawn(-SLACK) <= found) & (found <= drawn(SLACK))).all()
    return float((found != drawn(0.0)).float().mean())


def some_params(num_rows: int, seed: int = 0) -> Tensor:
    """Return parameters of which each limit is there in some rows and absent in others."""
    generator = torch.Generator().manual_seed(seed)

    def chosen(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (num_rows,), generator=generator)]

    columns = (chosen(0.3, 0.7, 1.0, 1.5), chosen(0, 0, 1, 5, 50, 1000), chosen(1, 1, 0.1, 0.5, 0.95))
    return torch.stack((*columns, torch.rand(num_rows, generator=generator)), 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_are_the_references_own_on_its_samples(dtype: torch.dtype, device: torch.device) -> None:
    for sample in SAMPLE.samples(dtype, CPU):
        if dtype in HALF and device.type == "cpu" and sample.name not in ("all limits", "greedy and others"):
            continue
        call = {name: value[:: many(device, 2, 1)] for name, value in sample.kwargs.items()}
        tokens = sampling.sample(**moved(call, device))
        assert laid_out([tokens]) == laid_out(faked(SAMPLE, call))
        assert torch.equal(tokens.cpu(), SAMPLE.reference(**call)), sample.name


@pytest.mark.parametrize("form", ["normal", "peaked", "flat", "steps"])
def test_draws_agree_with_fp64(form: str, device: torch.device) -> None:
    vocabulary, num_rows = many(device, 700, 128_256), many(device, 7, 1000)
    logits = randn(num_rows, vocabulary, scale={"normal": 2.5, "peaked": 8.0, "flat": 0.02, "steps": 2.0}[form])
    logits = logits.round() if form == "steps" else logits
    params = some_params(num_rows, seed=3)
    tokens = sampling.sample(logits.to(device), params.to(device)).cpu()
    assert misses(tokens, logits, params) <= many(device, 0, 1) * 0.02


@pytest.mark.parametrize(
    ("form", "dtype"), [("normal", torch.float32), ("steps", torch.bfloat16), ("equal", torch.float32)]
)
def test_bins_that_hold_more_than_is_listed(form: str, dtype: torch.dtype, device: torch.device) -> None:
    num_rows = many(device, 8, 400)
    logits = randn(num_rows, 300, scale=0.0 if form == "equal" else 2.0).to(dtype)
    logits = logits.round() if form == "steps" else logits
    params = some_params(num_rows, seed=4)
    tokens = sampling.run_sample(logits.to(device), params.to(device), SMALL).cpu()
    assert misses(tokens, logits, params) == 0.0


def test_equal_logits_are_in_the_order_of_their_ids(device: torch.device) -> None:
    logits = torch.zeros(7, 100)
    logits[:, 50:] = -0.0
    params = torch.tensor(
        [[1.0, 10.0, 1.0, u] for u in (0.0, 0.05, 0.15, 0.55, 0.95)] + [[1, 0, 0.095, 0.999], [0, 0, 1, 0]]
    )
    for config in (None, SMALL):
        tokens = sampling.run_sample(logits.to(device), params.to(device), config)
        assert tokens.tolist() == [0, 0, 1, 5, 9, 9, 0]


def test_greedy_rows_are_the_argmax_with_the_lowest_id(device: torch.device) -> None:
    for dtype in DTYPES:
        logits = randn(6, 3000, dtype=dtype, scale=0.5).mul(4).round()
        logits[1], logits[2, 7] = float("-inf"), float("nan")
        params = torch.zeros(6, 4)
        tokens = sampling.sample(logits.to(device), params.to(device)).cpu()
        assert torch.equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("vocabulary", [1, 63, 5000])
def test_rows_of_any_length_and_in_any_place(vocabulary: int, device: torch.device) -> None:
    params = some_params(4)
    wide = randn(4, vocabulary + 9, scale=3.0)
    for logits in (wide[:, 5 : 5 + vocabulary], wide.t().contiguous().t()[:, :vocabulary]):
        call = moved({"logits": logits, "sampling_params": params}, device)
        assert misses(sampling.sample(**call).cpu(), logits, params) == 0.0


def test_masked_tokens_are_never_drawn(device: torch.device) -> None:
    logits = randn(6, 200)
    logits[:, 1::2] = float("-inf")
    params = torch.tensor([[100.0, 0.0, 1.0, u] for u in (0.0, 0.3, 0.6, 0.9, 0.999999, 1.0)])
    tokens = sampling.sample(logits.to(device), params.to(device))
    assert (tokens % 2 == 0).all()
    assert misses(tokens.cpu(), logits, params) == 0.0


def test_extreme_numbers(device: torch.device) -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[-3e38, 3e38, 2e38, 3e38]] * 3 + [[1e-42, 2e-42, 0.0, -1e-42]] * 2)
    settings = [
        (1e-5, 0.0, 1.0, 0.2),
        (1e-5, 0.0, 1.0, 0.7),
        (3e38, 0.0, 1.0, 0.0),
        (1e-38, 0.0, 1.0, 0.0),
        (1.0, 2, 1, 0.7),
    ]
    params = torch.tensor(settings)
    tokens = sampling.sample(logits.to(device), params.to(device)).cpu()
    assert tokens.tolist() == SAMPLE.reference(logits, params).tolist()
    broken = torch.tensor([[nan, 1.0, 2.0], [-inf, -inf, -inf], [inf, 1.0, 2.0], [0.0, -inf, -inf]])
    found = sampling.sample(broken.to(device), torch.tensor([[1.0, 2.0, 0.9, 0.5]] * 4, device=device))
    assert ((found >= 0) & (found < 3)).all()
    assert found[3] == 0


def test_the_kernels_own_sort(kernel_device: torch.device) -> None:
    logits, params = randn(2, 40, scale=2.0), torch.tensor([[1.0, 9.0, 0.9, 0.8], [1.0, 0.0, 1.0, 0.4]])
    tokens = sampling.run_sample(logits.to(kernel_device), params.to(kernel_device), SMALL).cpu()
    assert misses(tokens, logits, params) == 0.0


def test_every_configuration_gives_the_same(device: torch.device) -> None:
    configs = list(sampling.candidates(2, 3000))
    assert len(configs) > 5
    logits, params = randn(2, 3000, scale=2.0).to(device), some_params(2, seed=9).to(device)
    wanted = sampling.sample(logits, params)
    for config in configs[:: many(device, 17, 1)]:
        assert torch.equal(sampling.run_sample(logits, params, config), wanted)

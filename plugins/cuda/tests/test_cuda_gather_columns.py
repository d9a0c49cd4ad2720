"""core_cuda/passes/gather_columns.py and its kernel: matches, equal bits, what stays and why, layouts, a mistake."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from core.errors import CoreError
from core.verify.planted import Mistake, with_mistake
from tests.kernel_cases import DTYPES, moved, randn

pytest.importorskip("triton", reason="needs triton")
from cuda_compiled import compiled, device_with

from core_cuda.ops import gather_columns as module
from core_cuda.ops.gather_columns import gather_columns
from core_cuda.passes.columns import blocks_of
from core_cuda.passes.gather_columns import GATHER_COLUMNS

NAME = GATHER_COLUMNS.name
HALF = torch.bfloat16
Parts = Sequence[Tensor]


def qwen3_next(y: Tensor) -> Parts:
    query, key, value, z = torch.split(y.view(len(y), 1, 2, 48), [8, 8, 16, 16], dim=3)
    value, z = (each.reshape(each.size(0), each.size(1), -1, 8) for each in (value, z))
    query, key, value = (each.reshape(each.shape[0], each.shape[1], -1) for each in (query, key, value))
    return torch.cat((query, key, value), dim=-1), z.reshape(-1, z.shape[-1])


def slices(y: Tensor) -> Parts:
    heads = y[:, 8:88].view(-1, 4, 20)
    return heads[..., :8].contiguous(), heads[..., 8:9].flatten(1), heads[:, 1:, 9:].clone(), y[:, :5].contiguous()


def narrowed(y: Tensor) -> Parts:
    first, second = y.unflatten(-1, (4, 2, 12)).unbind(2)
    return first.narrow(1, 1, 2).reshape(len(y), 24), torch.flatten(second, 1), y.unflatten(-1, (8, 12))[:, 3].clone()


def turned(y: Tensor) -> Parts:
    heads = y.unflatten(-1, (2, 3, 16))
    return heads.transpose(1, 2).reshape(len(y), -1), heads[..., :8].permute(0, 2, 1, 3).contiguous()


def merged_rows(y: Tensor) -> Parts:
    first, second = y.view(-1, 4, 24).chunk(2, -1)
    return first.reshape(-1, 6), second.reshape(-1, 24)


def repeated(y: Tensor) -> Parts:
    key, value = y.unflatten(-1, (2, 48)).chunk(2, -1)
    return tuple(each[:, :, None].expand(-1, 2, 3, 24).reshape(len(y), 6, 24) for each in (key, value))


def read_elsewhere(y: Tensor) -> Parts:
    first, second = (part.reshape(len(y), -1) for part in y.view(-1, 2, 48).split([16, 32], -1))
    return first, torch.cat((second, first, y[:, :3]), 1)


def twice_over(y: Tensor) -> Parts:
    first, second = (part.reshape(len(y), -1) for part in y.view(-1, 2, 48).split([16, 32], -1))
    return (torch.cat((torch.cat((second, first), -1)[:, 1:], first), -1),)


def many(y: Tensor) -> Parts:
    return tuple(part.contiguous() for part in y.split(16, -1))


def written_before(y: Tensor) -> Parts:
    y = y.mul_(2)
    y[:, 3] = 1
    return merged_rows(y)


def unsqueezed(y: Tensor) -> Parts:
    first, second = y[None].unflatten(-1, (2, 48)).split([16, 32], -1)
    return torch.cat((first, second), -1)[..., 1:].reshape(len(y), -1), second.flatten(2)


def shared_beyond(y: Tensor) -> Parts:
    """A copy that is part of the first launch's results and of the second's."""
    both = y.view(-1, 2, 48)[..., :16].reshape(len(y), -1)
    three = (y[:, 8 * i : 8 * i + 8].contiguous() for i in range(3))
    return (*three, torch.cat((both, y[:, :3]), -1), torch.cat((y[:, 40:44], both), -1))


SPELLINGS: dict[str, tuple[Callable[[Tensor], Parts], int]] = {
    "Qwen3-Next's": (qwen3_next, 1),
    "slices": (slices, 1),
    "narrowed": (narrowed, 1),
    "columns turned": (turned, 1),
    "rows merged with columns": (merged_rows, 1),
    "repeated": (repeated, 1),
    "a part read elsewhere": (read_elsewhere, 1),
    "copies of copies": (twice_over, 1),
    "more than a launch makes": (many, 2),
    "written before": (written_before, 1),
    "a base with another view's rows": (unsqueezed, 1),
    "a part of two launches": (shared_beyond, 2),
}


def rows_end_to_end(y: Tensor) -> Parts:
    return torch.cat((y[:, 0], y[:, 1])).view(2, -1).t(), y[:, 8:16].contiguous()


def conjugate(y: Tensor) -> Parts:
    wide = torch.view_as_complex(y.float().view(-1, 48, 2))
    parts = wide.conj().imag[:, :8].contiguous(), wide.real[:, :8].contiguous()
    return tuple(part.to(y.dtype) for part in parts)


def of_other_dtypes(y: Tensor) -> Parts:
    whole = y.float()
    codes = whole.view(torch.int16)[:, 4:20].clone()
    return codes.view(torch.float32).clamp(-1, 1).to(y.dtype), whole[:, :5].contiguous().to(y.dtype)


def free(y: Tensor) -> Parts:
    heads = y.reshape(len(y), 4, 24)
    return heads.flatten(1), heads.contiguous(), y.view(-1, 24).reshape(-1, 96), heads[:, :1].reshape(-1, 24)


def one(y: Tensor) -> Parts:
    first, second = y.view(-1, 4, 24).chunk(2, -1)
    return first, second.reshape(-1, 48)


def joined(y: Tensor) -> Parts:
    return (torch.cat((y[:, 8:16], y[:, :8]), -1),)


def heads_first(y: Tensor) -> Parts:
    first, second = (part.transpose(0, 1).contiguous() for part in y.view(-1, 4, 24).chunk(2, -1))
    return first.sin().transpose(0, 1), second.sin().transpose(0, 1)


def some_rows(y: Tensor) -> Parts:
    first, second = (part[1:].reshape(-1, 48) for part in y.view(-1, 4, 24).chunk(2, -1))
    return y + first.sum(), y + second.sum()


def two_bases(y: Tensor) -> Parts:
    first, second = y.view(-1, 4, 24).chunk(2, -1)
    return (torch.cat((first.flatten(1), y.sin(), second[:, 0]), -1),)


def scattered(y: Tensor) -> Parts:
    turned = y.view(-1, 8, 12).transpose(1, 2)
    return turned.flatten(1), turned[:, :10].flatten(1)


def in_fp64(y: Tensor) -> Parts:
    return tuple(part.to(y.dtype) for part in merged_rows(y.double()))


def varying(y: Tensor) -> Parts:
    square = (y @ y.t()).t()
    return square.contiguous().sum(1, True), square[None].contiguous().sum(2).t()


def result_written(y: Tensor) -> Parts:
    first, second = y.view(-1, 4, 24).chunk(2, -1)
    first, second = first.flatten(1), second.flatten(1)
    second.add_(1)
    return first, second


def written_between(y: Tensor) -> Parts:
    first, second = y.view(-1, 4, 24).chunk(2, -1)
    first = first.flatten(1)
    y.add_(1)
    return first, second.flatten(1)


def written_after(y: Tensor) -> Parts:
    first, second = merged_rows(y)
    y.add_(1)
    return first, second, y


def part_written(y: Tensor) -> Parts:
    first, second = (part.reshape(len(y), -1) for part in y.view(-1, 2, 48).split([16, 32], -1))
    first[:, 2] = 7
    return (torch.cat((second, first), 1),)


OTHERS: dict[str, tuple[Callable[[Tensor], Parts], str]] = {
    "views are free": (free, ""),
    "one copy": (one, ""),
    "rows end to end": (rows_end_to_end, ""),
    "negative numbers": (conjugate, ""),
    "of other dtypes": (of_other_dtypes, ""),
    "one cat of views": (joined, ""),
    "heads first": (heads_first, ""),
    "some of the rows": (some_rows, ""),
    "two bases": (two_bases, "which is not made of columns of"),
    "too many blocks": (scattered, "is made of more than 8 blocks of columns of"),
    "in fp64": (in_fp64, "it is torch.float64, and the kernel takes "),
    "columns in a number that varies": (varying, "a number of columns that varies"),
    "a result is written": (result_written, "writes into"),
    "written between": (written_between, "writes into"),
    "written after": (written_after, "writes into"),
    "a part is written": (part_written, "writes into"),
}


class Layers(nn.Module):
    """Two layers, each of a product whose columns a function lays out, and one back to their width."""

    def __init__(self, lay_out: Callable[[Tensor], Parts]) -> None:
        super().__init__()
        self.up = nn.ParameterList(nn.Parameter(randn(96, 24, seed=seed, scale=0.3)) for seed in (1, 2))
        self.down = nn.Parameter(randn(300, 24, seed=3, scale=0.1))
        self.lay_out = lay_out

    def forward(self, x: Tensor) -> Tensor:
        for up in self.up:
            for part in self.lay_out(x @ up.t()):
                rows = part.sin().reshape(len(x), -1)
                x = x + rows @ self.down[: rows.shape[1]]
        return x


def of(fn: Callable[[Tensor], Parts], dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    return Layers(fn), randn(9, 24, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
@torch.no_grad()
def test_copies_become_one_launch_and_no_bit_changes(
    spelling: str, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    lay_out, launches = SPELLINGS[spelling]
    model, x = of(lay_out, dtype)
    device = device_with(kernel_device, GATHER_COLUMNS)
    program, reports = compiled(model, device, x, verify="full", strict=True)
    assert (reports[NAME].matched, reports[NAME].near_misses) == (2 * launches, ())
    assert reports[NAME].verification == "verified"
    apart, reports = compiled(model, device, x, disable_passes=(NAME,))
    assert NAME not in reports
    assert torch.equal(*(each(x=x.to(device.torch_device)).cpu() for each in (program, apart)))


@pytest.mark.parametrize("case", OTHERS)
@torch.no_grad()
def test_others_stay(case: str, kernel_device: torch.device) -> None:
    lay_out, reason = OTHERS[case]
    model, x = of(lay_out, HALF)
    device = device_with(kernel_device, GATHER_COLUMNS)
    program, reports = compiled(model, device, x, strict=True)
    assert reports[NAME].matched == 0
    assert [reason in miss.reason for miss in reports[NAME].near_misses] == [True] * (2 if reason else 0)
    apart = compiled(model, device, x, disable_passes=(NAME,))[0]
    assert torch.equal(*(each(x=x.to(device.torch_device)).cpu() for each in (program, apart)))


@torch.no_grad()
def test_every_example_has_a_match(kernel_device: torch.device) -> None:
    assert GATHER_COLUMNS.examples is not None
    for model, (x,) in GATHER_COLUMNS.examples():
        for dtype in DTYPES:
            reports = compiled(model, device_with(kernel_device, GATHER_COLUMNS), x.to(dtype), strict=True)[1]
            assert reports[NAME].matched == 1, (model, dtype)


class Own(nn.Module):
    """A layer of transformers' own, whose rows are the tokens of one sequence."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x[None])[0]
        return result


@pytest.mark.parametrize(("without", "launches"), [((), 1), (("merge_linears",), 2)], ids=["one product", "two"])
@torch.no_grad()
def test_the_layer_of_transformers_has_its_columns_gathered(
    without: tuple[str, ...], launches: int, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next", reason="no such models")
    # What this says depends on torch's version. Where it says yes, the rule copies parts of a square of varying size.
    monkeypatch.setattr(source, "is_torchdynamo_exporting", lambda: True, raising=False)
    config = source.Qwen3NextConfig(
        hidden_size=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8
    )
    torch.manual_seed(0)
    model, x = Own(source.Qwen3NextGatedDeltaNet(config, 0)), randn(9, 32, dtype=HALF)
    device = device_with(kernel_device, GATHER_COLUMNS)
    program, reports = compiled(model, device, x, strict=True, disable_passes=without)
    # queries, keys, values and gates of one product, decays and rates of the other; or all of both, made one
    assert without or reports["merge_linears"].matched == 1
    missed = [miss.reason for miss in reports[NAME].near_misses if "ut_system" not in miss.reason]
    assert (reports[NAME].matched, missed) == (launches, [])
    apart = compiled(model, device, x, disable_passes=(NAME, *without))[0]
    assert torch.equal(*(each(x=x.to(device.torch_device)).cpu() for each in (program, apart)))


def shift(node: fx.Node) -> bool:
    """Begin the first block a column later."""
    if node.target is not gather_columns:
        return False
    given: Any = node.args
    base, blocks, counts = given
    node.args = (base, [blocks[0] + 1, *blocks[1:]], counts)
    return True


@torch.no_grad()
def test_a_planted_mistake_is_found(kernel_device: torch.device) -> None:
    mistake = Mistake(name="wrong", of=NAME, what=str(shift.__doc__), make=shift)
    device = device_with(kernel_device, with_mistake(GATHER_COLUMNS, mistake))
    model, x = of(qwen3_next, HALF)
    with pytest.raises(CoreError, match=NAME):
        compiled(model, device, x, verify="full", strict=True)


def bases(dtype: torch.dtype) -> list[Tensor]:
    """Return rows of any strides, none at all, and a single one without a dimension of rows."""
    x = randn(4, 3, 1030, dtype=dtype)
    return [
        *(x, x[..., 6:], x.transpose(0, 1), x[::2, :2, :1024], x[:1], x[0, 0], x[:0], x[..., ::2]),
        *(randn(2, 3, 4, 520, dtype=dtype).permute(2, 0, 1, 3), randn(1, 600, dtype=dtype).expand(5, 600)),
    ]


CALLS: list[tuple[list[int], list[int]]] = [
    ([0, 4, 128, 32, 32, 4, 128, 32, 64, 4, 128, 64], [2, 1]),
    ([3, 1, 0, 7], [1]),
    ([0, 2, 0, 5, 500, 3, -100, 1, 8, 1, 0, 500, 0, 500, 1, 1], [2, 1, 1]),
    ([number for i in range(8) for number in (64 * (7 - i), 1, 0, 64)] + [0, 512, 1, 1], [8, 1]),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_and_the_layout_are_those_of_the_reference(dtype: torch.dtype, kernel_device: torch.device) -> None:
    for x in bases(dtype):
        for call in CALLS:
            found, wanted = gather_columns(moved({"x": x}, kernel_device)["x"], *call), module._reference(x, *call)
            assert [(each.shape, each.stride()) for each in found] == [(each.shape, each.stride()) for each in wanted]
            assert all(torch.equal(one.cpu(), other) for one, other in zip(found, wanted, strict=True)), x.stride()


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (([90, 1, 0, 7], [1]), "x has 96 columns, and block (90, 1, 0, 7) is not among them"),
        (([8, 3, -8, 2], [1]), "block (8, 3, -8, 2) is not among them"),
        (([0, 1, 0, 1] * 9, [9]), "of 1 to 8 blocks each are made"),
        (([0, 1, 0, 1] * 5, [1] * 5), "1 to 4 results"),
        (([], []), "1 to 4 results"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(call: Any, reason: str, kernel_device: torch.device) -> None:
    with pytest.raises(ValueError, match="core_cuda::gather_columns") as refused:
        gather_columns(torch.empty(2, 96, device=kernel_device), *call)
    assert reason in str(refused.value)


def test_columns_are_as_few_blocks_as_they_can_be() -> None:
    def blocks(columns: Sequence[int]) -> tuple[Any, ...]:
        return blocks_of(torch.tensor(columns).numpy(), 3)

    assert blocks([4, 5, 6]) == ((4, 1, 0, 3),)
    assert blocks([0, 1, 8, 9, 16, 17, 2, 3]) == ((0, 3, 8, 2), (2, 1, 0, 2))
    assert blocks([5, 5, 5, 4, 3]) == ((5, 3, 0, 1), (4, 2, -1, 1))
    assert blocks([0, 2, 5, 9, 14, 20, 27]) == ()

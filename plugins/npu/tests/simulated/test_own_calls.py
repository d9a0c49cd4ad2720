"""Calls of torch_npu's own with lengths in host lists, in a captured model: break points read them at every step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import core
from simulator import runtime

HEADS, SIZE, PAGE, ROWS = 2, 64, 16, 3


@core.eager_break
def attend(query: Tensor, pages: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
    """Attend for one token (ROWS, 1, HEADS, SIZE) of each sequence; the list is made anew at each call."""
    out, _ = torch.ops.npu.npu_fused_infer_attention_score(
        query,
        pages,
        pages,
        actual_seq_lengths_kv=lengths.tolist(),
        num_heads=HEADS,
        num_key_value_heads=HEADS,
        scale=SIZE**-0.5,
        input_layout="BSND",
        block_size=PAGE,
        block_table=table,
    )
    return torch.as_tensor(out)


class Model(nn.Module):
    """Its own attention between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(HEADS * SIZE, HEADS * SIZE), nn.Linear(HEADS * SIZE, 8)
        self.register_buffer("pages", torch.randn(ROWS + 1, PAGE, HEADS * SIZE))

    def forward(self, x: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
        query = self.first(x).view(ROWS, 1, HEADS, SIZE)
        result: Tensor = self.last(attend(query, self.pages, lengths, table).view(ROWS, -1))
        return result


def step(*lengths: int) -> dict[str, Tensor]:
    given = {
        "x": torch.randn(ROWS, HEADS * SIZE).half(),
        "lengths": torch.tensor(lengths),
        "table": torch.arange(1, ROWS + 1, dtype=torch.int32)[:, None],
    }
    return {name: value.to("npu") for name, value in given.items()}


def test_a_break_point_of_ones_own_reads_the_lengths_of_each_step() -> None:
    torch.manual_seed(0)
    model = Model().half().to("npu").eval()
    inputs = {name: core.InputSpec(tuple(value.shape), value.dtype) for name, value in step(1, 1, 1).items()}
    program = core.capture(
        model, "npu", inputs=inputs, mode="segmented", options=core.CompileOptions(eager=(), examples=[step(4, 2, 7)])
    )
    assert [str(key) for key in program.keys] == ["main[]"]
    for lengths in ((5, 1, 16), (2, 9, 3)):
        given = step(*lengths)
        with torch.no_grad():
            expected = model(**given)
        runtime.clear()
        assert torch.equal(program(**given).cpu(), expected.cpu())

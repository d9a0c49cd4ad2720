"""Wrong passes of plugins: whoever reads the error learns which pass it was."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

import core
from core import InputSpec, Program
from core.errors import CaptureError, LoweringError
from tests.support import cpu, refused, rewrite

X = torch.linspace(-2, 3, 64).view(4, 16)


def model(x: Tensor) -> Tensor:
    left, right = x + 1, x * 2
    return torch.nn.functional.silu(left) * right


def compiled(**device: Any) -> Program:
    return core.compile(model, cpu(**device), inputs={"x": InputSpec((4, 16), torch.float32)}, lowering="inline")


def insert(target: Any, *, metadata: bool) -> Any:
    def change(module: fx.GraphModule) -> list[str]:
        (add,) = module.graph.find_nodes(op="call_function", target=operator.add)
        with module.graph.inserting_after(add):
            node = module.graph.call_function(target, (add,))
        node.meta = dict(add.meta) if metadata else {}
        add.replace_all_uses_with(node, delete_user_cb=lambda user: user is not node)
        return [node.name]

    return rewrite(change, before=("remove_no_ops",))


def fails(x: Tensor) -> Tensor:
    raise ValueError("no such luck")


def test_a_pass_whose_new_call_fails_is_named_by_the_capture() -> None:
    with refused(CaptureError, "no such luck", "'acme_pass' of acme", "disable_passes"):
        compiled(passes=(insert(fails, metadata=True),))


def test_a_pass_that_leaves_out_metadata_is_named_where_it_is_needed() -> None:
    with refused(LoweringError, "no example value", "'acme_pass' of acme"):
        compiled(passes=(insert(torch.abs, metadata=False),))

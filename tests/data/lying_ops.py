"""An op library whose fakes are true of some ops and lie about others, one lie each; one kernel crashes, one hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("lying_ops", "DEF")


def _op(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any] | None) -> None:
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, kernel, "CPU")
    if fake is not None:
        torch.library.register_fake(f"lying_ops::{name}", fake, lib=LIBRARY)


def _bump(x: Tensor) -> Tensor:
    result = x.clone()
    x.add_(1)
    return result


def _crash(x: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGSEGV)
    return x


def _hang(x: Tensor) -> Tensor:
    time.sleep(3600)
    return x


def _picky(x: Tensor, table: Tensor, head: int) -> Tensor:
    if x.dim() != 7:
        raise ValueError("x must have seven dimensions")
    return x


def _scale(x: Tensor, by: float) -> None:
    x.mul_(by)


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    if x.dim() != 2 or w.dim() != 2 or (b is not None and b.shape != w.shape[:1]):
        raise ValueError("rows and a matrix, please")
    return (x @ w.t() if b is None else x @ w.t() + b).contiguous()


def _contiguous(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


_op("true_copy(Tensor x) -> Tensor", _copy, _contiguous)
_op("true_linear(Tensor x, Tensor w, Tensor? b=None) -> Tensor", _linear,
    lambda x, w, b=None: x.new_empty(*x.shape[:-1], w.shape[0]))  # fmt: skip
_op("true_scale(Tensor(a!) x, float by) -> ()", _scale, lambda x, by: None)
_op("true_rows(Tensor x, int n) -> (Tensor, Tensor)", lambda x, n: (x.new_zeros(n, 3), x.new_zeros(3, n).int()),
    lambda x, n: (x.new_empty(n, 3), x.new_empty(3, n, dtype=torch.int32)))  # fmt: skip
_op("wrong_shape(Tensor x) -> Tensor", _copy, lambda x: x.new_empty((*x.shape, 2)))
_op("wrong_dtype(Tensor x) -> Tensor", lambda x: _copy(x).float(), _contiguous)
_op("wrong_strides(Tensor x) -> Tensor", lambda x: x.mT.contiguous().mT, _contiguous)
_op("wrong_count(Tensor x) -> Tensor[]", lambda x: [_copy(x), _copy(x)], lambda x: [_contiguous(x)])
_op("writes(Tensor x) -> Tensor", _bump, torch.empty_like)
_op("returns_input(Tensor x) -> Tensor", lambda x: x, torch.empty_like)
_op("returns_view(Tensor x) -> Tensor", lambda x: x[:1], lambda x: x.new_empty((1, *x.shape[1:])))
_op("fake_returns_input(Tensor x) -> Tensor", torch.clone, lambda x: x)
_op("fake_forgets_alias(Tensor(a!) x) -> Tensor(a!)", lambda x: x.add_(1), torch.empty_like)
_op("fake_raises(Tensor x) -> Tensor", _copy, lambda x: x.new_empty(int(x.sum())))
_op("no_fake(Tensor x) -> Tensor", _copy, None)
_op("picky(Tensor x, Tensor table, int head) -> Tensor", _picky, lambda x, table, head: x)
_op("no_guess(Tensor x, str how) -> Tensor", lambda x, how: _copy(x), lambda x, how: _contiguous(x))
_op("z_crashes(Tensor x) -> Tensor", _crash, _contiguous)
_op("z_hangs(Tensor x) -> Tensor", _hang, _contiguous)

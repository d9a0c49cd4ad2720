"""What `verify` says through core.compile of passes that it could not judge, whoever is to blame for that."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import core
from core import InputSpec, Program
from core.compilation.cache.reports import decode_report, encode_report
from core.compilation.rewrite.pass_report import PassReport
from core.errors import PassError
from tests.support import compile_with, cpu, refused, rewrite


@torch.library.custom_op("verifying::boom", mutates_args=())
def boom(x: Tensor) -> Tensor:
    """Raise on real tensors, as an op whose library is not there does."""
    raise RuntimeError("no library")


@boom.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("verifying::single", mutates_args=())
def single(x: Tensor) -> Tensor:
    """Have no fp64 form."""
    if x.dtype != torch.float32:
        raise NotImplementedError(f"no kernel for {x.dtype}")
    return x.sin()


@single.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Boom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        called: Tensor = boom(x)
        return called


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Boom()

    def forward(self, x: Tensor) -> Tensor:
        called: Tensor = self.inner((x * 1).contiguous())
        return torch.rsqrt((called * called).mean(-1, keepdim=True) + 1e-5) * called.contiguous()


class Single(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        called: Tensor = single(x.exp())
        return called


X = torch.linspace(0.1, 1, 32).view(4, 8)


def compiled(model: nn.Module, device: Mapping[str, Any] | None = None, **options: Any) -> Program:
    options = {"verify": "full", "examples": [{"x": X}], "buckets": [4]} | options
    inputs = {"x": InputSpec(("n", 8), torch.float32)}
    return compile_with(model.eval(), cpu(**device or {}), inputs=inputs, lowering="inline", **options)


def reports(program: Program) -> dict[str, PassReport]:
    return {each.name: each for each in program.report().traces[0].passes}


def rounded_otherwise(graph: fx.GraphModule) -> list[str]:
    """Compute exp by its parts, which differs in the last bits."""
    found = [node for node in graph.graph.nodes if node.target == "exp"]
    for node in found:
        with graph.graph.inserting_before(node):
            half = graph.graph.call_function(torch.mul, (node.args[0], 0.5))
            half.meta = dict(node.meta)
            root = graph.graph.call_function(torch.exp, (half,))
            root.meta = dict(node.meta)
        node.op, node.target, node.args = "call_function", torch.mul, (root, root)
    return [node.name for node in found]


def test_an_op_of_the_model_that_fails_is_no_fault_of_a_pass(caplog: pytest.LogCaptureFixture) -> None:
    seen: dict[str, PassReport] = {}
    with caplog.at_level(logging.WARNING, "core.passes"), pytest.raises(core.CoreError, match="no library") as caught:
        seen |= reports(compiled(Failing()))
    assert not isinstance(caught.value, PassError) and not seen
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "core.passes"]
    assert "the model's own graph can't be run on the examples" in warning
    assert "node called (torch.ops.verifying.boom" in warning and ") in inner: RuntimeError: no library" in warning
    assert "undone" not in caplog.text and "report it" not in caplog.text


def test_strict_refuses_passes_that_an_op_of_the_model_keeps_from_being_verified() -> None:
    with refused(PassError, "'remove_no_ops' of core", "can't be run on the examples", "no library", "verify"):
        compiled(Failing(), strict=True)


def test_what_verification_found_is_in_the_reports() -> None:
    device = {"passes": (rewrite(rounded_otherwise),)}
    program = compiled(Exp(), device)
    found = reports(program)
    assert found["acme_pass"].matched == 1 and found["acme_pass"].verification == "verified"
    assert {each.verification for each in found.values() if not each.matched} == {""}
    assert "pass acme_pass: 1 matched in" in str(program.report()) and ", verified" in str(program.report())
    plain = compiled(Exp(), device, verify="off")
    assert reports(plain)["acme_pass"].verification == "" and "verified" not in str(plain.report())


class Exp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


def test_a_pass_without_an_fp64_run_is_not_verified_and_strict_refuses_it(caplog: pytest.LogCaptureFixture) -> None:
    device = {"passes": (rewrite(rounded_otherwise),)}
    with caplog.at_level(logging.WARNING, "core.passes"):
        program = compiled(Single(), device)
    report = reports(program)["acme_pass"]
    assert report.matched == 1 and not report.error
    assert report.verification.startswith("not verified: the fp64 run failed with NotImplementedError: no kernel")
    assert report.verification in str(program.report())
    (trace,) = program.report().traces
    assert "acme_pass 1 NOT VERIFIED" in trace.passes_line()
    assert program.report().to_json()["traces"][0]["passes"]  # type: ignore[index]
    assert "'acme_pass' of acme" in caplog.text and "no kernel for torch.float64" in caplog.text
    with refused(PassError, "verifying pass 'acme_pass' of acme", "NotImplementedError", "'acme_pass'", "strict"):
        compiled(Single(), device, strict=True)


def test_without_an_example_that_fits_nothing_is_verified() -> None:
    device = {"passes": (rewrite(rounded_otherwise),)}
    options: dict[str, Any] = {"examples": [{"x": X[:3]}], "buckets": [1]}
    found = reports(compiled(Exp(), device, **options))["acme_pass"]
    assert found.verification.startswith("not verified: none of the examples fits")
    with refused(PassError, "verifying pass 'acme_pass'", "none of the examples fits", "examples"):
        compiled(Exp(), device, strict=True, **options)


def test_the_cache_keeps_what_verification_found() -> None:
    (trace,) = compiled(Exp(), {"passes": (rewrite(rounded_otherwise),)}).report().traces
    again = decode_report(encode_report(trace), trace.buckets)
    assert [each.verification for each in again.passes] == [each.verification for each in trace.passes]
    old = encode_report(trace)  # as versions before this field wrote it
    for each in old["passes"]:
        del each["verification"]
    assert decode_report(old, trace.buckets).passes == tuple(replace(each, verification="") for each in again.passes)

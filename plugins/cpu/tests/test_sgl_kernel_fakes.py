"""The fakes of `sgl_kernel` against reference kernels of the same schemas: metadata, writes, aliases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload

from core.common.fakes import FakeOp, FakeResult, apply_fakes, nothing
from core.common.fakes.schema import find_overload, mutated
from core.errors import PluginError
from core.verify.fakes.memory import same_bits
from core.verify.fakes.parity import compare
from core_cpu.fakes import SGL_KERNEL
from core_cpu.fakes.sgl_kernel import RULES
from tests.sgl_kernel import reference
from tests.sgl_kernel.schemas import SCHEMAS
from tests.support import refused

CPU = torch.device("cpu")
BY_NAME = {fake.op.partition("::")[2]: fake for fake in SGL_KERNEL}

WRITES = "writes its argument '{}', which the schema does not declare"
SHARES = "result {} shares memory with argument '{}'"
UNDECLARED: Mapping[str, tuple[str, ...]] = {
    "apply_rotary_pos_emb_cpu": (
        WRITES.format("query"),
        WRITES.format("key"),
        SHARES.format(0, "query"),
        SHARES.format(1, "key"),
    ),
    "chunk_gated_delta_rule_cpu": (WRITES.format("initial_state"), SHARES.format(1, "initial_state")),
    "decode_attention_cpu": tuple(WRITES.format(name) for name in ("k_cache", "v_cahce", "attn_logits")),
    "fused_add_layernorm_cpu": (WRITES.format("residual"),),
}
"""What kernels do that their schemas deny; no fake can say it, so that each such line is the library's to mend."""


@pytest.fixture(scope="module")
def results() -> Iterator[Mapping[str, FakeResult]]:
    """Have the reference library, with the pack's fakes applied to it, and yield what became of each."""
    if find_overload("sgl_kernel::rmsnorm_cpu") is not None:
        pytest.skip("sgl_kernel itself is loaded; `core fakes --check sgl_kernel` compares it")
    library = torch.library.Library("sgl_kernel", "DEF")
    reference.define(library)
    yield {fake.op.partition("::")[2]: result for fake, result in apply_fakes(SGL_KERNEL)}
    library._destroy()


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    """Have as many ranks as the collectives of the reference library pretend."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=reference.RANKS)
    yield
    torch.distributed.destroy_process_group()


def overload(name: str) -> OpOverload:
    found = find_overload(f"sgl_kernel::{name}")
    assert found is not None
    return found


def taken(name: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a sample that this version of the op has."""
    names = {each.name for each in overload(name)._schema.arguments}
    return {key: value for key, value in kwargs.items() if key in names}


def differences(name: str) -> dict[str, list[str]]:
    samples = BY_NAME[name].samples
    assert samples is not None
    return {sample.name: compare(overload(name), taken(name, sample.kwargs)) for sample in samples(CPU)}


def test_the_pack_holds_the_ops_that_models_are_traced_through() -> None:
    assert len(SGL_KERNEL) == 55 and len({fake.op for fake in SGL_KERNEL}) == 55
    assert {schema.partition("(")[0] for schema in SCHEMAS} == set(RULES) == set(reference.KERNELS)


def test_every_fake_fits_its_schema_and_is_registered(results: Mapping[str, FakeResult]) -> None:
    assert {name for name, result in results.items() if not result.applied} == set()
    named = {name for name, result in results.items() if "does not declare" in result.reason}
    # The experts write their input only in place, the convolution its states only where it is given any.
    assert named == {*UNDECLARED, "causal_conv1d_fwd_cpu", "fused_experts_cpu", "shared_expert_cpu"}


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_the_fake_says_what_the_kernel_does(results: Mapping[str, FakeResult], name: str) -> None:
    found = differences(name)
    assert found
    for sample, problems in found.items():
        assert sorted(problems) == sorted(UNDECLARED.get(name, ())), sample


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_what_the_kernel_writes_is_declared(results: Mapping[str, FakeResult], name: str) -> None:
    """Values of the named arguments change and no others, but for writes that depend on an argument."""
    fake, op = BY_NAME[name], overload(name)
    written = set()
    for sample in fake.samples(CPU) if fake.samples else ():
        before = taken(name, sample.kwargs)
        after = {key: value.clone() if isinstance(value, Tensor) else value for key, value in before.items()}
        op(**after)
        written |= {
            key for key, value in before.items() if isinstance(value, Tensor) and not same_bits(value, after[key])
        }
    names = {each.name for each in op._schema.arguments}
    known = {each for each in fake.also_writes if each in names}
    assert set(mutated(op._schema)) <= known, "the pack does not name what the schema declares"
    assert written <= known
    assert known - written <= {"hidden_states", "conv_states"}, "the samples do not show it"


@pytest.mark.parametrize("name", ["fused_experts_cpu", "shared_expert_cpu"])
def test_in_place_experts_are_found_out(results: Mapping[str, FakeResult], name: str) -> None:
    (sample,) = BY_NAME[name].samples(CPU)  # type: ignore[misc]
    problems = compare(overload(name), {**taken(name, sample.kwargs), "inplace": True})
    assert problems == [WRITES.format("hidden_states"), SHARES.format(0, "hidden_states")]


# The rotary op, whose fake in SGLang returns the inputs for rows of rank 2.


def returns_its_inputs(positions: Tensor, query: Tensor, key: Tensor, head: int, table: Tensor, neox: bool) -> Any:
    if query.ndim == 3:
        return torch.empty_like(query), torch.empty_like(key)
    return query, key


def rotary_library(kernel: Any, fake: Any) -> OpOverload:
    """Return the rotary op in a library of its own with this kernel and this fake."""
    schema = next(each for each in SCHEMAS if each.startswith("rotary_embedding_cpu"))
    namespace = f"rotary_{len(LIBRARIES)}"
    library = torch.library.Library(namespace, "DEF")
    LIBRARIES.append(library)
    library.define(schema)
    library.impl("rotary_embedding_cpu", kernel, "CPU")
    ((_, result),) = apply_fakes([FakeOp(op=f"{namespace}::rotary_embedding_cpu", rule=fake)])
    assert result.applied
    op = find_overload(f"{namespace}::rotary_embedding_cpu")
    assert op is not None
    return op


LIBRARIES: list[torch.library.Library] = []


def rotary_calls(op: OpOverload) -> dict[str, list[str]]:
    samples = BY_NAME["rotary_embedding_cpu"].samples
    assert samples is not None
    return {sample.name: compare(op, sample.kwargs) for sample in samples(CPU)}


def test_our_rotary_fake_is_right_and_the_one_that_returns_its_inputs_is_caught() -> None:
    kernel = reference.KERNELS["rotary_embedding_cpu"]
    assert set(map(tuple, rotary_calls(rotary_library(kernel, RULES["rotary_embedding_cpu"])).values())) == {()}
    wrong = rotary_calls(rotary_library(kernel, returns_its_inputs))
    lie = "the fake's result {} shares memory with argument '{}', and the kernel's does not"
    assert wrong["heads"] == []
    assert wrong["rows"] == wrong["batch"] == [lie.format(0, "query"), lie.format(1, "key")]


def test_an_older_kernel_that_turns_its_inputs_is_caught_too() -> None:
    op = rotary_library(reference._rotary_in_place, RULES["rotary_embedding_cpu"])
    assert rotary_calls(op)["rows"] == [
        WRITES.format("query"),
        WRITES.format("key"),
        SHARES.format(0, "query"),
        SHARES.format(1, "key"),
    ]


def test_returning_an_argument_is_refused_where_the_schema_says_new_memory() -> None:
    from core.common.fakes import argument, results

    with refused(PluginError, "rotary_embedding_cpu", "result 0 is query itself", "new memory"):
        rotary_library(reference.KERNELS["rotary_embedding_cpu"], results(argument("query"), argument("key")))


# Versions of the library that differ.


def test_another_version_of_an_op_is_skipped_with_the_reason() -> None:
    library = torch.library.Library("older_kernels", "DEF")
    LIBRARIES.append(library)
    library.define("fused_sigmoid_mul_cpu(Tensor(a!) input, Tensor gate, bool inplace) -> Tensor(a!)")
    fake = replace(BY_NAME["fused_sigmoid_mul_cpu"], op="older_kernels::fused_sigmoid_mul_cpu")
    ((_, result),) = apply_fakes([fake])
    assert not result.applied
    assert result.reason == (
        "op older_kernels::fused_sigmoid_mul_cpu is another version here: its rule gives no result; "
        "the op returns Tensor(a!)"
    )
    with refused(PluginError, "its rule gives no result", "the op returns Tensor(a!)"):
        apply_fakes([FakeOp(op=fake.op, rule=nothing)])


def test_where_the_library_is_absent_nothing_is_registered() -> None:
    declared = [replace(fake, op=fake.op.replace("sgl_kernel", "absent_kernels")) for fake in SGL_KERNEL[:3]]
    for fake, result in apply_fakes(declared):
        assert result == FakeResult(applied=False, reason=f"op {fake.op} is not loaded in this process")

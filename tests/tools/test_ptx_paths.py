"""tools/cuda/ptx_*.py and overlap_rule.py: mistakes planted in PTX are found, and what is right is let pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from overlap_rule import judged, parameters
from ptx_code import FETCH, OTHER, READ, STORE, Instruction, read_ptx
from ptx_paths import UNKNOWN, analyse

HEAD = """
.version 8.7
.target sm_90a
.visible .entry kernel( // a comment
    .param .u64 .ptr .global .align 1 kernel_param_0,
    .param .u64 .ptr .global .align 1 kernel_param_1,
    .param .align 64 .b8 kernel_param_2[128],
    .param .u64 kernel_param_3,
    .param .u64 .ptr .global .align 1 kernel_param_4,
    .param .u64 .ptr .global .align 1 kernel_param_5
)
.reqntid 128
{
    .reg .pred %p<9>;
    .loc 1 7 0 // kernel.py:7:0
    ld.param.b64 %rd0, [kernel_param_0];
    ld.param.b64 %rd1, [kernel_param_1];
    mov.b64 %rd2, kernel_param_2;
    ld.param.b64 %rd3, [kernel_param_3];
"""
NAMES = ["x", "weight", "descriptor", "stride"]
WAIT = "griddepcontrol.wait; // dummy %r1\n"
END = "ret;\n}\n.section .debug_info { .b8 1; }\n"


def faults(body: str, **allowed: Any) -> list[str]:
    """Return what is wrong about a kernel."""
    found: list[str] = judged(HEAD + body + END, NAMES, allowed, before="")["faults"]
    return found


def early(body: str) -> set[str]:
    """Return what a kernel reads before its wait."""
    return set(judged(HEAD + body + END, NAMES, {}, before="")["early"])


def allowed(*, guess: bool = False, confirmed: bool = False, after: str = "") -> SimpleNamespace:
    return SimpleNamespace(why="a reason", guess=guess, confirmed=confirmed, after=after)


RIGHT = {
    "straight": f"{WAIT} ld.global.b32 %r1, [%rd0]; st.global.b32 [%rd0], %r1;",
    "both sides wait": f"@%p1 bra $A; {WAIT} bra.uni $B;\n$A: {WAIT}\n$B: st.global.b32 [%rd0], %r1;",
    "a loop before": f"$A: add.s32 %r1, %r1, 1; setp.lt.s32 %p1, %r1, 9; @%p1 bra $A; {WAIT}",
    "a trap": f"@%p1 bra $A; {WAIT} bra.uni $B;\n$A: trap;\n$B:",
    "shared memory": f"st.shared.b32 [%r1], %r2; atom.shared.add.u32 %r1, [%r2], 1; {WAIT}",
    "fetch in braces": f"{{ .reg .u64 g; cvta.to.global.u64 g, %rd0; prefetch.global.L2 [g]; mov.u32 %r, 0; }} {WAIT}",
    "a bulk fetch": f"cp.async.bulk.prefetch.L2.global [%rd0], 1024; prefetch.tensormap [%rd2]; {WAIT}",
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes(name: str) -> None:
    assert faults(RIGHT[name]) == []


WRONG = {
    "no wait": ("", "ends before the wait"),
    "a store first": (f"st.global.b32 [%rd0], %r1; {WAIT}", "stores before the wait"),
    "a store to an address of any space": (f"st.b32 [%rd0], %r1; {WAIT}", "stores before the wait"),
    "a reduction": (f"@%p1 red.global.add.u32 [%rd0], 1; {WAIT}", "stores before the wait"),
    "a bulk store": (f"cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r1], 64; {WAIT}", "stores"),
    "a store by descriptor": (f"cp.async.bulk.tensor.1d.global.shared::cta [%rd2, {{0}}], [%r]; {WAIT}", "stores"),
    "a bulk reduction": (f"cp.reduce.async.bulk.global.shared::cta.add.u32 [%rd0], [%r], 8; {WAIT}", "stores"),
    "a descriptor written": (f"tensormap.replace.tile.rank.global.b1024.b32 [%rd0], 1; {WAIT}", "stores"),
    "a return on one way": (f"@%p1 bra $A; {WAIT}\n$A:", "ends before the wait"),
    "a return on a condition": (f"@%p1 ret; {WAIT}", "ends before the wait"),
    "an exit": (f"@!%p1 exit; {WAIT}", "ends before the wait"),
    "a loop that skips it": (f"$A: @%p1 bra $B; @%p2 bra $A; {WAIT}\n$B:", "ends before the wait"),
    "a table of ways": (f"brx.idx %r1, $T;\n$A: {WAIT} ret;\n$B: ret; $T: .branchtargets $A, $B;", "ends before"),
    "the next one starts": (f"griddepcontrol.launch_dependents; {WAIT}", "lets the next kernel start before"),
    "a function": (f"{{ call.uni\n helper,\n (%r1);\n}} {WAIT}", "calls a function"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_planted_mistake_is_found(name: str) -> None:
    body, expected = WRONG[name]
    assert any(expected in fault for fault in faults(body)), faults(body)


def test_a_wait_on_a_condition_is_none() -> None:
    found = faults(f"@%p1 {WAIT} st.global.b32 [%rd0], %r1;")
    assert [fault.split(":")[0] for fault in found[:2]] == [
        "waits on a condition only",
        "stores before the wait on some way through it",
    ]
    assert "(kernel.py:7:0)" in found[0]


def test_code_that_ends_without_a_return_is_found() -> None:
    _, found = analyse(HEAD + "add.s32 %r1, %r1, 1;\n}\n")
    assert "no instruction follows" in found.faults[0]


READS = {
    "x": "add.s64 %rd9, %rd0, %rd3; @%p1 ld.global.b32 { %r1 }, [ %rd9 + 0 ];",
    "weight": "cp.async.cg.shared.global [%r1], [%rd1], 16;",
    "descriptor": "cvta.param.u64 %rd9, %rd2; cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx"
    "::bytes [%r1], [%rd9, {%r2, %r3}], [%r4];",
}


@pytest.mark.parametrize("name", READS)
def test_reads_are_traced_to_the_argument(name: str) -> None:
    assert early(READS[name] + WAIT) == {name}
    assert faults(READS[name] + WAIT) != []
    assert faults(READS[name] + WAIT, **{name: allowed()}) == []


def test_reads_are_traced_along_all_ways_and_through_loads() -> None:
    chosen = "mov.b64 %rd9, %rd0; @%p1 bra $A; mov.b64 %rd9, %rd1;\n$A: ld.global.b32 %r1, [%rd9];"
    assert early(chosen + WAIT) == {"x", "weight"}
    looped = "mov.b64 %rd8, %rd1;\n$A: ld.global.b32 %r1, [%rd8]; mov.b64 %rd8, %rd0; @%p1 bra $A;"
    assert early(looped + WAIT) == {"x", "weight"}
    replaced = "mov.b64 %rd9, %rd0; mov.b64 %rd9, %rd1; ld.global.b32 %r1, [%rd9];"
    assert early(replaced + WAIT) == {"weight"}
    pointer = "ld.global.b64 %rd9, [%rd1]; ld.global.b32 %r1, [%rd9];"
    assert early(pointer + WAIT) == {"weight", "an address that comes from no argument"}
    assert UNKNOWN in analyse(HEAD + pointer + WAIT + END)[1].reads
    by_index = "ld.global.b32 %r1, [%rd1]; mad.wide.s32 %rd9, %r1, 4, %rd0; ld.global.b32 %r2, [%rd9];"
    assert early(by_index + WAIT) == {"x", "weight"}
    assert early("prefetch.global.L1 [%rd0];" + WAIT) == {"x"}
    assert early("ld.b32 %r1, [%rd0];" + WAIT) == {"x"}
    assert early(f"{WAIT} ld.global.b32 %r1, [%rd0];") == set()


GUESS = "ld.global.cg.b32 %r1, [%rd1]; mad.wide.s32 %rd9, %r1, 4, %rd0; prefetch.global.L2 [%rd9];"


def test_a_guess_decides_what_is_fetched_and_nothing_else() -> None:
    guess = {"weight": allowed(guess=True)}
    again = "ld.global.b32 %r1, [%rd1]; st.global.b32 [%rd0], %r1;"
    assert faults(GUESS + WAIT + again, **guess) == []
    assert "guesses weight" in faults(GUESS + WAIT + "st.global.b32 [%rd0], %r1;", **guess)[0]
    # What a guess was added to, on one of two ways, and kept on the way through a branch.
    kept = "add.s32 %r5, %r1, 1; @%p1 bra $A; mov.u32 %r5, 0;\n$A:"
    assert "guesses weight" in faults(GUESS + kept + WAIT + "@%p2 bra $B; st.global.b32 [%rd0], %r5;\n$B:", **guess)[0]
    # A load on a condition leaves the guess where it does not run.
    partly = "@%p3 ld.global.b32 %r1, [%rd1]; st.global.b32 [%rd0], %r1;"
    assert "guesses weight" in faults(GUESS + WAIT + partly, **guess)[0]
    assert "L1 cache" in faults(GUESS.replace(".cg", "") + WAIT, **guess)[0]


def test_a_guess_that_is_kept_is_compared_with_what_is_read_again() -> None:
    confirmed = {"weight": allowed(guess=True, confirmed=True)}
    use = "@%p1 bra $A; mov.u32 %r1, %r2;\n$A: st.global.b32 [%rd0], %r1;"
    again, other = ("ld.global.b32 %r2, [%rd1];", "ld.global.b32 %r2, [%rd0];")
    compared = "setp.eq.s32 %p1, %r1, %r2;"
    assert faults(GUESS + WAIT + again + compared + use, **confirmed) == []
    assert "guesses weight" in faults(GUESS + WAIT + again + compared + use, weight=allowed(guess=True))[0]
    total = again + "add.s32 %r3, %r1, %r2; setp.ne.s32 %p1, %r3, 0;"
    guarded = again + "setp.ne.s32 %p3, %r1, 0; @%p3 setp.eq.s32 %p1, %r2, 5;"
    at_guess = again + "mad.wide.s32 %rd5, %r1, 4, %rd1; ld.global.b32 %r4, [%rd5]; setp.ne.s32 %p1, %r4, 0;"
    bound, mixed = again + "setp.lt.s32 %p1, %r1, %r2;", again + "xor.b32 %r3, %r1, %r2;"
    wrong_ones = ("", compared, again, other + compared, again + "setp.eq.s32 %p1, %r1, 7;")
    for wrong in (before + use for before in (*wrong_ones, total, guarded, at_guess, bound, mixed)):
        (found,) = faults(GUESS + WAIT + wrong, **confirmed)
        assert "guesses weight" in found and "compares it with nothing that it reads there again" in found, wrong
    late = GUESS.replace(".cg", "") + WAIT + again + compared + use
    assert "L1 cache" in faults(late, **confirmed)[0]


def test_what_the_kernel_before_waited_for_needs_that_kernel_before() -> None:
    reason = {"weight": allowed(after="first")}
    for before, expected in (("first", []), ("second", ["follows second"]), ("", ["follows no kernel"])):
        found = judged(HEAD + GUESS + WAIT + END, NAMES, reason, before)["faults"]
        assert [all(text in fault for text in expected) for fault in found] == [True] * len(expected)


def test_opcodes_are_known() -> None:
    kinds = {
        "ld.global.nc.v4.b32": READ,
        "ld.global.L1::evict_first.L2::cache_hint.v4.b32": READ,
        "ld.param.b64": OTHER,
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16": OTHER,
        "cp.async.wait_group": OTHER,
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes": READ,
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes": OTHER,
        "redux.sync.add.s32": OTHER,
        "multimem.red.relaxed.sys.global.add.u32": STORE,
        "st.local.b32": OTHER,
        "prefetch.global.L2::evict_last": FETCH,
    }
    assert {opcode: Instruction("", opcode, ()).kind for opcode in kinds} == kinds


def test_parameters_are_laid_out_as_the_launcher_does() -> None:
    signature = {
        "x": "*bf16",
        "none": "constexpr",
        "tuple": ("*fp32", "constexpr", ("i32",)),
        "d": "tensordesc<bf16[1, 64]>",
    }
    assert list(parameters(signature, ())) == ["x", "tuple[0]", "tuple[2][0]", *["d"] * 11]
    assert list(parameters(signature, [{"swizzle": 3}])) == ["x", "tuple[0]", "tuple[2][0]", *["d"] * 5]
    with pytest.raises(ValueError, match="has 6 parameters, and 1 arguments"):
        judged(HEAD + END, ["x"], {}, before="")
    with pytest.raises(ValueError, match="no entry"):
        read_ptx("")

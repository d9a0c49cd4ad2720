"""core/compilation/report.py: one account for terminals and for machines."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from core.common.graphs.backend import GraphKey
from core.common.passes.results import NearMiss
from core.compilation.capture.bucket_report import BucketReport
from core.compilation.implementations import OpChoice
from core.compilation.measuring import MeasuredChoice
from core.compilation.report import ProgramReport, TraceReport
from core.compilation.rewrite.pass_report import PassReport

KEYS = (GraphKey("decode", (8, 4)), GraphKey("decode", (2, 4)))
PASS = PassReport(
    name="acme_fuse",
    owner="acme",
    stage="torch",
    matched=3,
    expected=4,
    elapsed_ms=1.5,
    sites=("model.layers.0",),
    near_misses=(NearMiss(site="model.layers.1", reason="eps differs"),),
)
CHOICES = (
    OpChoice(op="core::attention", node="attention", implementation="acme"),
    OpChoice(op="core::attention", node="attention_1", implementation="reference", refused=(("acme", "window"),)),
    OpChoice(op="core::attention", node="attention_2", implementation="acme"),
)


def report() -> ProgramReport:
    traces = tuple(
        TraceReport(
            phase="decode",
            num_nodes=nodes,
            trace_s=0.5,
            passes_s=0.0015,
            passes=(PASS,),
            ops=CHOICES,
            buckets=(key,),
            reason=reason,
        )
        for nodes, key, reason in ((12, KEYS[0], ""), (11, KEYS[1], "x has size 2"))
    )
    buckets = tuple(BucketReport(key=key, lower_s=0.1, capture_s=0.25, num_bytes=2**21) for key in KEYS)
    return ProgramReport(
        device="acme",
        plugin="acme-device 1.0",
        modes={"decode": "full", "prefill": "off"},
        lowering="inline",
        traces=traces,
        buckets=buckets,
        static_bytes=2**20,
        total_s=1.25,
        notes=("prefill runs eagerly",),
    )


def test_the_counts() -> None:
    assert (report().num_traces, report().num_captures) == (2, 2)


def test_the_text_says_what_was_done_and_what_it_cost() -> None:
    text = str(report())
    lines = [line.strip() for line in text.splitlines()]
    assert lines[0] == "acme (acme-device 1.0), lowering inline, decode: full, prefill: off"
    assert lines[1] == "trace decode: 12 nodes in 0.50 s, 1 pass in 1.5 ms, serves 1 bucket"
    assert "core::attention -> acme: 2" in lines and "core::attention -> reference: 1" in lines
    assert "pass acme_fuse: 3 of 4 owed matched, 1 near-misses in 1.5 ms" in lines
    assert any(line.startswith("trace decode: 11 nodes") and line.endswith("(x has size 2)") for line in lines)
    assert "decode[8, 4]: lowered in 0.10 s, captured in 0.25 s, 2.0 MiB" in lines
    assert "note: prefill runs eagerly" in lines
    assert lines[-1] == "total 1.25 s, static buffers 1.00 MiB"


def test_a_shared_trace_counts_once_and_is_named() -> None:
    first, second = report().traces
    shared = replace(report(), traces=(first, replace(second, phase="prefill", trace_s=0.0, trace_of="decode")))
    assert shared.num_traces == 1
    line = "trace prefill: 11 nodes of the trace of decode, 1 pass in 1.5 ms, serves 1 bucket (x has size 2)"
    assert line in lines_of(shared)


def lines_of(made: ProgramReport) -> list[str]:
    return [line.strip() for line in str(made).splitlines()]


def test_the_text_says_what_was_served() -> None:
    lines = lines_of(report())
    assert "served decode: 0 replays" in lines and "0 eager calls, 0 compiles while serving" in lines
    served = replace(
        report(), replays={KEYS[0]: 3, KEYS[1]: 4}, fallbacks={"too large": 2, "another guard": 1}, compiles={"f": 1}
    )
    lines = lines_of(served)
    assert "served decode: 7 replays (decode[8, 4]: 3, decode[2, 4]: 4)" in lines
    assert "served prefill: eagerly, not counted (mode off)" in lines
    assert "3 eager calls, 1 compile while serving" in lines
    assert "ran eagerly 2 times: too large" in lines and "compiled while serving, 1 time: f" in lines


def test_passes_that_matched_nothing_are_one_line_and_others_keep_theirs() -> None:
    idle = replace(PASS, name="idle", matched=0, expected=None, near_misses=())
    told = (
        replace(idle, name="undone", error="it raised"),
        replace(idle, name="near", near_misses=PASS.near_misses),
        replace(idle, name="owed", expected=2),
    )
    skipped = replace(idle, name="skipped", skipped="no tokens")
    trace = report().traces[0]
    lines = lines_of(replace(report(), traces=(replace(trace, passes=(idle, PASS, *told, skipped)),)))
    assert [line.split(":")[0] for line in lines if line.startswith("pass ")] == [
        f"pass {each.name}" for each in (PASS, *told)
    ]
    assert "2 other passes matched nothing, 1 of them skipped" in lines
    assert "1 pass matched nothing" in lines_of(replace(report(), traces=(replace(trace, passes=(idle,)),)))


def test_the_time_of_a_start_is_told_by_its_parts() -> None:
    assert report().time_text(2.0) == "2.0 s: tracing 1.0, capturing 0.5, the rest 0.3, lowering 0.2"
    cached = replace(report(), traces=tuple(replace(trace, cached=True) for trace in report().traces), buckets=())
    assert cached.time_text(0.4) == "0.4 s"


def test_json_holds_everything_and_survives_a_round_trip() -> None:
    document = json.loads(json.dumps(report().to_json()))
    assert document["device"] == "acme" and document["modes"] == {"decode": "full", "prefill": "off"}
    assert document["traces"][1]["buckets"] == ["decode[2, 4]"]
    assert document["traces"][1]["reason"] == "x has size 2"
    (miss,) = document["traces"][0]["passes"][0]["near_misses"]
    assert miss == {"site": "model.layers.1", "reason": "eps differs", "node": "", "claimant": ""}
    assert document["traces"][0]["ops"][1]["refused"] == [["acme", "window"]]
    assert [bucket["key"] for bucket in document["buckets"]] == ["decode[8, 4]", "decode[2, 4]"]
    assert document["buckets"][0]["num_bytes"] == 2**21
    assert document["notes"] == ["prefill runs eagerly"]


def test_to_json_leaves_the_report_as_it_was() -> None:
    made = report()
    made.to_json()
    assert made == report()
    assert made.traces[0].buckets == (KEYS[0],)


def test_parts_are_json_ready_by_themselves() -> None:
    assert json.loads(json.dumps(PASS.to_json()))["expected"] == 4
    assert json.loads(json.dumps(asdict(CHOICES[1])))["implementation"] == "reference"


def test_one_measured_call_is_no_calls() -> None:
    whole = report()
    for nodes, told in ((("a",), "1 call in all"), (("a", "b"), "2 calls in all")):
        choice = MeasuredChoice(op="core::linear", bucket=KEYS[0], nodes=nodes, implementation="acme", times_us=())
        text = str(replace(whole, traces=(replace(whole.traces[0], measured=(choice,)),)))
        assert f"core::linear by time -> acme: {told} buckets" in text

"""The report of a coverage sweep in Markdown: what was traced and lifted, what was not and why, and the numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from documentation.pages import escaped, table
from sweeping import Result, versions

VARIANTS = (
    "prefill-float32-sdpa",
    "prefill-dynamic-float32-sdpa",
    "decode-float32-sdpa",
    "prefill-float32-eager",
    "prefill-bfloat16-sdpa",
    "decode-bfloat16-sdpa",
)
KINDS = (
    *("rms_norm", "add_rms_norm", "gated_activation", "attention", "rotary"),
    *("layer_norm", "moe_route", "experts", "short_convolution", "recurrence"),
)
INTRODUCTION = """\
How many sites of real models the passes lift to canonical ops, over every model type that transformers maps to a causal
language model, built tiny with random weights, prefill and decode of two sequences on a static cache. Two thirds of the
types were there to develop the passes on; the other third (`sha256(name) % 3 == 0`) was held out."""
NUMBERS = """\
The rewritten graph against the graph as traced, outputs and written caches. T1: its error from an fp64 run over the
bound made of the unrewritten graph's own error; at most 1 passes. Graphs without a match say nothing: left out."""
DEFINITIONS = """\
Sites are counted in an eager run of a model of its own, by classes of modules, names of functions and aten ops at run
time, and never by what the passes look for (`tools/lift_coverage/oracle.py`):

- **rms_norm**: a call of a module with "norm" in its class's name whose own ops multiply its input by the inverse root
  of its mean square. A module that scales something else by it is none.
- **add_rms_norm**: an addition of two tensors of one shape whose sum is the input of an rms_norm; once, however many
  norms read it, and not where it is the last step of a rotation.
- **gated_activation**: a product inside an MLP or an expert of two tensors of one shape, one an activation (SiLU, GELU,
  ReLU, x * sigmoid, or a module of activations), the other a linear map, clamped or shifted at most.
- **attention**: a call of a module with "attention" or "attn" in its class's name that runs SDPA, or a softmax that
  feeds a product of matrices; innermost module only. One that attends twice is one site and owes two ops.
- **rotary**: what one module call rotates by the same tables: a query and a key together are one site, and so is a
  single tensor. Rotations are calls of functions named like `apply_rotary…` or `rotate_half…`, and products with
  cosines elsewhere.
- **layer_norm**, **moe_route** (a choice of the largest scores, attention apart), **experts** (a call of a module named
  like experts that multiplies matrices): likewise.
- **short_convolution**: a convolution of single channels over at most 8 steps, none of which is to come, or the sum of
  a window of steps times such a weight.
- **recurrence**: a call of a module named like a state space (Mamba, mixer), the delta rule, linear attention,
  lightning, RG-LRU, RWKV or LSTM that takes an exponential itself: the decay of its state.

Attention with a bias of positions (ALiBi, T5's) and in chunks (Llama 4) is **attention**, by the same rule.

A site is lifted where the rewritten graph has a canonical op of its kind in its module, each op standing for one site
only. Sites are counted in graphs that were traced whole. Short convolutions and recurrences of prompts are lifted on
the paged cache, whose states lie in slots as the ops take them; on the static cache they stay the model's own."""


def describe(result: Result) -> str:
    """Return one line about a result, for the terminal."""
    if result["stage"] != "done":
        return f"{result['type']:24} {result['stage']}: {result['error'][:200]}"
    found = list(result["variants"].values())
    traced = [facts for facts in found if _is_traced(facts)]
    cells = [f"{kind} {_of(traced, kind)}" for kind in KINDS if any(facts["num_sites"][kind] for facts in traced)]
    failed = sum(not facts["judged"]["passed"] for facts in traced)
    parts = [f"{result['type']:24} traced {len(traced)}/{len(found)}", *cells, f"{result['seconds']} s"]
    return "  ".join(parts) + (f"  NUMBERS WRONG IN {failed}" if failed else "")


def write_report(path: Path, developed: Sequence[Result], held_out: Sequence[Result], command: str) -> None:
    """Write the report: the development types, and the held-out ones apart."""
    apart = _part("Held-out types", held_out) if held_out else "\nThe held-out types have not been run.\n"
    text = f"""\
# Coverage

Written by `{command}`; do not edit.

{INTRODUCTION}

{", ".join(f"{name} {number}" for name, number in versions().items())}

## What is counted

{DEFINITIONS}
{_part("Development types", developed)}
{apart}
"""
    path.write_text(text, encoding="utf-8")


def _part(title: str, results: Sequence[Result]) -> str:
    done = [result for result in results if result["stage"] == "done"]
    sections: dict[str, Iterable[str]] = {
        "Traced whole": _traced(done),
        "Lifted": _lifted(done),
        "Numbers": _numbers(done),
        "By type": _types(done),
        "Not lifted": _missed(done),
        "Remarks": _remarks(done),
        "Not run": (f"- `{r['type']}`: {escaped(r['error'])}" for r in results if r["stage"] != "done"),
    }
    told = f"{len(results)} types, of which {len(done)} were built and run with a static cache."
    texts = (line for heading, lines in sections.items() for line in ("", f"### {heading}", "", *lines))
    return "\n".join(("", f"## {title}", "", told, *texts))


def _facts(results: Sequence[Result], variant: str) -> list[dict[str, Any]]:
    found = [result["variants"].get(variant) for result in results]
    return [facts for facts in found if facts is not None and _is_traced(facts)]


def _is_traced(facts: dict[str, Any]) -> bool:
    return not facts.keys() & {"untraced", "failed"}


def _traced(results: Sequence[Result]) -> Iterator[str]:
    rows = []
    for variant in VARIANTS:
        num = sum("failed" not in result["variants"].get(variant, {"failed": ""}) for result in results)
        traced = len(_facts(results, variant))
        rows.append((variant, str(num), str(traced), _percent(traced, num)))
    yield from (table(("variant", "types", "traced whole", "share"), rows), "")
    for result in results:
        reasons: dict[str, list[str]] = {}
        for variant, facts in result["variants"].items():
            reason = facts.get("untraced") or facts.get("failed")
            if reason:
                reasons.setdefault(f"{'not run, ' if 'failed' in facts else ''}{reason}", []).append(variant)
        for reason, variants in reasons.items():
            yield f"- `{result['type']}` ({_named(result, variants)}): {escaped(reason)}"


def _lifted(results: Sequence[Result]) -> Iterator[str]:
    def cell(kind: str, variant: str) -> str:
        sites, lifted = _sums(_facts(results, variant), kind)
        return f"{lifted} of {sites}, {_percent(lifted, sites)}"

    yield table(("kind", *VARIANTS), ((kind, *(cell(kind, variant) for variant in VARIANTS)) for kind in KINDS))


def _numbers(results: Sequence[Result]) -> Iterator[str]:
    rows = []
    for variant in VARIANTS:
        judged = [facts["judged"] for facts in _facts(results, variant) if facts["matched"]]
        equal = sum(one["equal"] for one in judged)
        passed = sum(one["passed"] and not one["equal"] for one in judged)
        unjudged = sum(bool(one["unjudged"]) for one in judged)
        worst = max((one["ratio"] for one in judged), default=0.0)
        counts = (len(judged), equal, passed, len(judged) - equal - passed - unjudged, unjudged)
        rows.append((variant, *map(str, counts), f"{worst:.2g}"))
    head = ("variant", "graphs with a match", "equal in every bit", "within T1", "not", "not judged", "worst ratio")
    yield from (NUMBERS, "", table(head, rows), "")
    for result, variant, facts in _each(results):
        if not facts["judged"]["passed"]:
            reason = facts["judged"]["reason"] or facts["judged"]["unjudged"]
            yield f"- `{result['type']}` {variant}: {escaped(reason)}"


def _types(results: Sequence[Result]) -> Iterator[str]:
    def row(result: Result) -> Iterable[str]:
        found = [facts for _, _, facts in _each([result])]
        worst = max((facts["judged"]["ratio"] for facts in found), default=0)
        wrong = any(not facts["judged"]["passed"] for facts in found)
        traced = f"{len(found)}/{len(result['variants'])}"
        kinds = (_of(found, kind) for kind in KINDS)
        return (f"`{result['type']}`", traced, *kinds, f"{worst:.2f}{' FAILED' if wrong else ''}")

    told = "Lifted of all sites, over all variants; the ratio is the worst of the variants."
    yield from (told, "", table(("type", "traced", *KINDS, "T1"), map(row, results)))


def _missed(results: Sequence[Result]) -> Iterator[str]:
    lifted = {kind for kind in KINDS for _, _, facts in _each(results) if facts["num_lifted"][kind]}
    for kind in KINDS:
        if kind not in lifted:
            yield f"- no pass lifts {kind}; its sites are not listed"
    for result in results:
        sites: dict[tuple[str, ...], list[str]] = {}
        for _, variant, facts in _each([result]):
            for miss in facts["missed"]:
                site = miss["site"]
                if site["kind"] in lifted:
                    node = f" at node `{miss['node']}`" if miss["node"] else ""
                    told = (site["kind"], f"`{site['path']}` ({site['class_name']})", f"{miss['reason']}{node}")
                    sites.setdefault(told, []).append(variant)
        if sites:
            yield f"- `{result['type']}`"
        for (kind, place, reason), variants in sites.items():
            yield f"  - {kind} {place}: {escaped(reason)} ({_named(result, variants)})"


def _named(result: Result, variants: Sequence[str]) -> str:
    names = list(dict.fromkeys(variants))
    return "all variants" if len(names) == len(result["variants"]) > 1 else ", ".join(names)


def _remarks(results: Sequence[Result]) -> Iterator[str]:
    """Yield what else was found: passes that failed, calls that differ, and canonical ops at no site."""
    for result in results:
        found: dict[str, list[str]] = {}
        for _, variant, facts in _each([result]):
            for text in (*facts["errors"], *facts["disagreements"]):
                found.setdefault(" ".join(text.split()), []).append(variant)
        for text, variants in found.items():
            yield f"- `{result['type']}`: {escaped(text)} ({_named(result, variants)})"
    extra = Counter(
        (result["type"], text.partition(" ")[0]) for result, _, facts in _each(results) for text in facts["extra"]
    )
    kinds = Counter(kind for _, kind in extra.elements())
    if kinds:
        yield "- canonical ops at no site counted above, such as gates of state-space layers:"
    for kind, count in kinds.items():
        types = sorted({name for name, other in extra if other == kind})
        yield f"  - {kind}, {count} in {len(types)} types: {', '.join(types)}"


def _each(results: Sequence[Result]) -> Iterator[tuple[Result, str, dict[str, Any]]]:
    for result in results:
        for variant, facts in result["variants"].items():
            if _is_traced(facts):
                yield result, variant, facts


def _sums(found: Iterable[dict[str, Any]], kind: str) -> tuple[int, int]:
    """Return the sites of a kind, and how many of them are lifted."""
    each = [(facts["num_sites"][kind], facts["num_lifted"][kind]) for facts in found]
    return sum(sites for sites, _ in each), sum(lifted for _, lifted in each)


def _of(found: Iterable[dict[str, Any]], kind: str) -> str:
    sites, lifted = _sums(found, kind)
    return f"{lifted}/{sites}" if sites else ""


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"

"""What is told of the sweep: a line for each class, and the page of tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from documentation.pages import escaped, table
from sweeping import Result, versions

KINDS = ("attention", "layer_norm", "rms_norm", "rotary", "gated_activation", "moe_route", "experts")
COMMAND = "python tools/model_sweep --report docs/models.md"


def outcome(result: Result) -> str:
    """Name how a class came out: right, WRONG, partly, no graph, not judged, fails, not run."""
    if result["stage"] in ("build", "eager", "run"):
        return "not run"
    if result["stage"] != "done":
        return "fails"
    if result["passed"] is None:
        return "not judged"
    if not result["passed"]:
        return "WRONG"
    if not result["graphs"]:
        return "no graph"
    return "partly" if result["originals"] or result["undone"] else "right"


def describe(result: Result) -> str:
    """Return a line for the terminal, and one for each reason."""
    lifted = " ".join(f"{kind} {got}/{owed}" for kind, (got, owed) in result.get("lifted", {}).items())
    breaks = sum(result.get("breaks", {}).values())
    head = f"{result['type']:32} {outcome(result):10} {result.get('graphs', 0)} graphs, {breaks} breaks  {lifted}"
    return "\n    ".join([f"{head}  {result.get('seconds', 0):.0f} s", *reasons(result)])


def reasons(result: Result) -> Iterator[str]:
    """Yield what is not plain about a result."""
    if result.get("error"):
        yield f"{result['stage']}: {result['error']}"
    if result.get("reason"):
        yield result["reason"]
    for why, count in result.get("originals", {}).items():
        yield f"{count} calls ran as they were traced: {why}"
    for told in result.get("undone", ()):
        yield f"undone: {told}"
    for why, count in result.get("breaks", {}).items():
        yield f"graph break, {count} times: {why}"


def page(results: Sequence[Result], families: Sequence[str], num_classes: int) -> str:
    """Return the page. num_classes: of all families; those without a result for the installed versions are counted."""
    ordered = sorted(results, key=lambda result: (families.index(result["family"]), result["type"]))
    told = (f"- `{each['type']}`: {escaped('; '.join(reasons(each)))}\n" for each in ordered if list(reasons(each)))
    numbers = ", ".join(f"{name} {number}" for name, number in versions().items())
    return f"""\
# Models by torch.compile

Written by `{COMMAND}`; do not edit.

transformers' classes that are no causal language models (for these see [architectures.md](architectures.md)), one for
each model type and family: the first that has the type among the automatic classes of the family
(`tools/model_sweep/families.py`). Each is built tiny with random fp32 weights, norms and biases perturbed, and called
twice by `torch.compile(model, backend="core")` on the processor with lowering `inline`.

- **right**: no call of a graph ran as Dynamo traced it, no pass was undone, and the outputs pass criterion T1 against
  an fp64 run: errors over their bound, which is made of eager's own errors. 0 is equal in every bit; at most 1 passes.
- **partly**: the outputs pass, and some graph ran as it was traced. **not judged**: the outputs differ, and eager's own
  are too far from fp64 to judge by. **not run**: transformers' own code does not run in this environment on inputs that
  the sweep knows.
- **graphs, breaks**: graphs that Dynamo made of the forward, and places at which it left the forward to Python.
- **lifted**: sites of canonical ops that were found in an eager run (as in [coverage.md](coverage.md)) and that
  canonical ops stand for in the rewritten graphs.

{numbers}; {len(ordered)} of {num_classes} classes were tried{" so far" if len(ordered) < num_classes else ""}.

{table(("family", "classes", "run", "right", "of those run", "one graph", "sites lifted"), _summary(ordered, families))}

{table(("kind of site", "lifted", "sites", "share"), _kinds(ordered))}

{table(("type", "class", "family", "outcome", "graphs", "breaks", "lifted", "T1"), map(_row, ordered))}

## Reasons

{"".join(told)}"""


def _summary(results: Sequence[Result], families: Sequence[str]) -> Iterator[list[str]]:
    for family in (*families, "all"):
        own = [each for each in results if family in (each["family"], "all")]
        run = [each for each in own if outcome(each) != "not run"]
        right = sum(outcome(each) == "right" for each in run)
        whole = sum(each.get("graphs") == 1 and not each.get("breaks") for each in run)
        got, owed = (sum(pair[i] for each in run for pair in each.get("lifted", {}).values()) for i in (0, 1))
        yield [family, str(len(own)), str(len(run)), str(right), _share(right, len(run)), str(whole), _share(got, owed)]


def _kinds(results: Sequence[Result]) -> Iterator[list[str]]:
    got, owed = Counter[str](), Counter[str]()
    for each in results:
        for kind, (some, of) in each.get("lifted", {}).items():
            got[kind] += some
            owed[kind] += of
    for kind in owed:
        yield [kind, str(got[kind]), str(owed[kind]), _share(got[kind], owed[kind])]


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""


def _row(result: dict[str, Any]) -> list[str]:
    got, owed = (sum(pair[i] for pair in result.get("lifted", {}).values()) for i in (0, 1))
    ratio = f"{result['ratio']:.2f}" if "ratio" in result else ""
    return [
        *(f"`{result['type']}`", result.get("class", ""), result["family"], outcome(result)),
        *(str(result.get("graphs", "")), str(sum(result["breaks"].values())) if "breaks" in result else ""),
        *(f"{got} of {owed}" if owed else "", ratio),
    ]

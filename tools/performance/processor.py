"""The section "Processor" of docs/performance.md, from the documents of tools/processor_bench.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from documentation.pages import table

Document = Mapping[str, Any]
_QUIET = 0.5
"""More busy processors than this before a run mean other work: the figures are then no final ones."""


def processor(folder: Path) -> str:
    """Return the section; "" where nothing was measured."""
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return "\n".join(_section(documents)) if documents else ""


def _section(documents: Sequence[Document]) -> Iterator[str]:
    first = documents[0]
    dates = sorted({document["started"][:10] for document in documents})
    yield f"""\
## Processor

{first["device"]["product"]}; {_versions(documents)}.
Measured {" to ".join(dict.fromkeys((dates[0], dates[-1])))} by
`python tools/processor_bench.py docs/performance/processor`.

Milliseconds of a decode step: median over the rounds (least to most). In brackets stands how much of that the floor is,
and for a peer how many of its tokens agree with those of `core`. The floor is the time to read the step's weights and
cache, or to multiply, at the fastest rates that the same run measured. A model that fits into the caches may take less.
[bench.md](bench.md#peers) says what each way is.
"""
    loads = [document["load_before"] for document in documents]
    if max(loads) > _QUIET:
        among = f"{min(loads):g} to {max(loads):g}"
        yield f"**Measured under load, not final**: {among} processors were busy before the runs.\n"
    for threads in sorted({document["settings"]["threads"] for document in documents}):
        yield from _table(threads, [each for each in documents if each["settings"]["threads"] == threads])
    missing = {name: why for document in documents for name, why in document["settings"]["missing"].items()}
    yield "".join(f"- Not measured: `{name}`: {why}.\n" for name, why in missing.items())


def _versions(documents: Sequence[Document]) -> str:
    """Return the versions of the runs' own environment, then those of each peer that has another one."""
    known = documents[0]["versions"]
    here, elsewhere = {name: known[name] for name in ("torch", "transformers")}, {}
    for document in documents:
        for cell in document["cells"]:
            for subject in cell["subjects"]:
                found = subject.get("versions") or {}
                if any(found.get(name, number) != number for name, number in here.items()):
                    elsewhere[f"`{subject['subject']}`: "] = found
                else:
                    here |= found
    listed = {"": here} | elsewhere
    return "; ".join(who + ", ".join(f"{name} {number}" for name, number in listed[who].items()) for who in listed)


def _table(threads: int, documents: Sequence[Document]) -> Iterator[str]:
    cells = [(document, cell) for document in documents for cell in document["cells"]]
    ways = list(dict.fromkeys(subject["subject"] for _, cell in cells for subject in cell["subjects"]))
    rates = sorted(document["rates"]["reads"][str(threads)] / 1e9 for document in documents)
    settings = [document["settings"] for document in documents]
    yield f"### {threads} thread{'' if threads == 1 else 's'}\n"
    rounds, steps = (" or ".join(map(str, sorted({each[name] for each in settings}))) for name in ("rounds", "steps"))
    yield f"Reading: {rates[0]:.1f} to {rates[-1]:.1f} GB/s over the runs; {rounds} rounds of {steps} steps.\n"
    rows = []
    for document, cell in cells:
        by_name = {subject["subject"]: subject for subject in cell["subjects"]}
        floor = cell["floor"]["ms"]
        model = f"{document['name']}, {document['model']['dtype']}, context {document['context']}"
        rows.append([model, str(cell["batch"]), f"{floor:#.3g}", *(_figure(by_name.get(way), floor) for way in ways)])
    yield table(["model", "batch", "floor", *(f"`{way}`" for way in ways)], rows) + "\n"


def _figure(subject: Document | None, floor: float) -> str:
    """Return a median with its spread, the floor's share and the tokens that agree, or why there is none."""
    if subject is None:
        return "-"
    if subject["failure"] or subject["ms"] is None:
        return subject["failure"].partition(";")[0][:120] or "-"
    found = subject["ms"]
    median, least, most = (f"{found[name]:#.3g}" for name in ("median", "min", "max"))
    check = subject["check"] or {}
    agree = f"; {check['tokens_agreeing']}/{check['tokens_compared']}" if check.get("against") == "core" else ""
    return f"{median} ({least} to {most}) [{floor / found['median']:.0%}{agree}]"

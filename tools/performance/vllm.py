"""The section "Beside vLLM" of docs/performance.md, from the documents of tools/cuda/bench_beside_vllm.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from documentation.pages import table

Document = Mapping[str, Any]


def beside_vllm(folder: Path) -> str:
    """Return the section; "" where nothing was measured."""
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return "\n".join(_section(documents)) if documents else ""


def _section(documents: Sequence[Document]) -> Iterator[str]:
    cells = [cell for document in documents for cell in document["cells"]]
    names = sorted({cell["name"] for cell in cells} | _too_large(documents), key=lambda name: int(name.split("/")[1]))
    yield f"""\
## Beside vLLM

{_places(cells)}.
Measured by `python tools/cuda/bench_beside_vllm.py docs/performance/vllm tools/cuda/shapes/*.json`.

Milliseconds of a decode step at context {documents[0]["settings"]["context"]}: median over the rounds (least to most);
then vLLM's median over that of `core`, and the floor over `core`. Both ran in one command, in turns, or one after the
other (†) where the GPU does not hold both. Weights are random, and each draws its own.
"""
    heads = ["model", *(f"`{name}`" for name in names)]
    for title, shown in (("`core`", _figure("core")), ("vLLM", _figure("vllm")), ("vLLM over `core`", _lead)):
        rows = [[_model(document), *(_cell(document, name, shown) for name in names)] for document in documents]
        yield f"{title}:\n\n{table(heads, rows)}\n"
    rows = [[_model(document), *(_cell(document, name, _floor) for name in names)] for document in documents]
    yield f"Floor over `core`:\n\n{table(heads, rows)}\n"


def _too_large(documents: Sequence[Document]) -> set[str]:
    return {name for document in documents for name in document.get("too_large", {})}


def _model(document: Document) -> str:
    return f"{document['model']['title'].split(',')[0]}, {document['model']['num_parameters'] / 1e9:.1f} B"


def _places(cells: Sequence[Document]) -> str:
    """Return the cards, days and versions of the runs, each once."""
    runs = [cell["run"] for cell in cells]
    found = {_subject(cell, "vllm").get("versions", {}).get("vllm") for cell in cells}
    versions = {f"{name} {run['versions'][name]}" for run in runs for name in ("torch", "triton", "transformers")}
    products, days = ({each(run) for run in runs} for each in (_product, _day))
    told = [
        *sorted(products),
        *sorted(days),
        *sorted(versions),
        *(f"vLLM {each}" for each in sorted(filter(None, found))),
    ]
    return ", ".join(told)


def _product(run: Document) -> str:
    return str(run["device"]["product"])


def _day(run: Document) -> str:
    return str(run["started"][:10])


def _cell(document: Document, name: str, shown: Any) -> str:
    """Return what is shown of a cell, or why there is nothing."""
    found = next((cell for cell in document["cells"] if cell["name"] == name), None)
    if found is not None:
        return str(shown(found))
    needed = document.get("too_large", {}).get(name)
    return f"needs {needed} GiB" if needed else "not run"


def _subject(cell: Document, name: str) -> Document:
    return next((each for each in cell["subjects"] if each["subject"] == name), {})


def _figure(name: str) -> Any:
    def shown(cell: Document) -> str:
        subject = _subject(cell, name)
        found = subject.get("ms")
        if not found:
            return str(subject.get("failure") or "-").split(":")[0]
        mark = "" if subject["interleaved"] else " †"
        return f"{found['median']:.2f} ({found['min']:.2f} to {found['max']:.2f}){mark}"

    return shown


def _lead(cell: Document) -> str:
    both = [(_subject(cell, name).get("ms") or {}).get("median") for name in ("vllm", "core")]
    return f"{both[0] / both[1]:.3f}" if all(both) else "-"


def _floor(cell: Document) -> str:
    found = _subject(cell, "core").get("ms")
    return f"{cell['floor']['ms'] / found['median']:.0%}" if found else "-"

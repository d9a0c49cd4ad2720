"""Write docs/performance.md from what was measured on one GPU: benches, gains of passes, kernels, start-up.

    python tools/performance_page.py docs/performance [--out docs/performance.md]

The folder holds `bench-PRESET.json` (core bench --json), and where they were made its plot `bench-PRESET.svg`,
`gains-PRESET.json` (benchmarks/pass_gains.py --json), `kernels.json` (tools/cuda/bench_cuda_kernels.py --out) and
`notes.md`, whose text the page begins with. Every figure of the page comes from these files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

Document = Mapping[str, Any]

NAMES = {"core": "`core`", "torch": "torch", "flashinfer": "FlashInfer"}
"""Of the ways that kernels.json times."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def ms(value: float | None) -> str:
    """Return milliseconds as text, three digits at least."""
    return "-" if value is None else f"{value:#.3g}" if value < 99.95 else f"{value:.1f}"


def us(value: float | None) -> str:
    """Return microseconds as text."""
    return "-" if value is None else f"{value:.2f}"


def figure(subject: Document, name: str = "ms") -> str:
    """Return a median with its spread, or why there is none."""
    found = subject[name]
    if found is None:
        return subject["failure"].split(":")[0] if subject["failure"] else "-"
    return f"{ms(found['median'])} ({ms(found['min'])} to {ms(found['max'])})"


def share(floor: float, subject: Document | None) -> str:
    """Return how much of a subject's median the floor is."""
    return f"{floor / subject['ms']['median']:.0%}" if subject is not None and subject["ms"] else "-"


def bench(document: Document) -> Iterator[str]:
    """Yield the section of one model."""
    model, rates, cells = document["model"], document["rates"], document["cells"]
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items() if number)
    yield f"## {model['title']}"
    yield ""
    subjects = list(dict.fromkeys(s["subject"] for cell in cells for s in cell["subjects"]))
    others = f" Of transformers the attention `{model['attention']}`." if set(subjects) - {"core"} else ""
    yield f"`{model['class']}`, {model['num_parameters'] / 1e9:.2f} B parameters, {model['dtype']}.{others}"
    yield f"Decode at context {document['settings']['context']}."
    yield f"{document['device']['product']}, {document['started'][:10]}; {versions}."
    bandwidth, products = rates["bytes_per_s"] / 1e12, rates["flops_per_s"] / 1e12
    yield f"Copies {bandwidth:.2f} TB/s, products {products:.0f} TFLOP/s in this run."
    yield ""
    by_cell = {cell["name"]: {s["subject"]: s for s in cell["subjects"]} for cell in cells}
    rows = [
        [f"`{subject}`", *(figure(by[subject]) if subject in by else "-" for by in by_cell.values())]
        for subject in subjects
    ]
    graphs = [figure(by["core"], "replay_ms") if "core" in by else "-" for by in by_cell.values()]
    rows.append(["`core`, the graph alone", *graphs])
    for name, known in document["references"].items():
        rows.append([name, *(f"{known[cell]:g}" if cell in known else "-" for cell in by_cell)])
    rows.append(["floor", *(ms(cell["floor"]["ms"]) for cell in cells)])
    shares = [share(cell["floor"]["ms"], by_cell[cell["name"]].get("core")) for cell in cells]
    rows.append(["floor over `core`", *shares])
    given = " Others' figures were given to the run, not measured in it." if document["references"] else ""
    yield f"Milliseconds, median over the rounds (least to most).{given}"
    yield ""
    yield from table(["", *by_cell], rows)
    yield from checks(by_cell)
    if document.get("start"):
        yield from start(document["start"])
    for cell in cells:
        if cell["kernels"]:
            yield from kernels_of(cell)


def start(document: Document) -> Iterator[str]:
    """Yield the seconds from a process's start to the first token, by phase."""
    yield "Seconds from the start of a process to the first token:"
    yield ""
    phases = list(dict.fromkeys(phase for way in document.values() for phase in way["phases"]))
    rows = [
        [name, *(f"{way['phases'].get(phase, 0.0):.2f}" for phase in phases), f"{way['total_s']:.1f}"]
        for name, way in document.items()
    ]
    yield from table(["", *phases, "together"], rows)


def checks(by_cell: Mapping[str, Mapping[str, Document]]) -> Iterator[str]:
    """Yield what the comparison of tokens and logits said of `core`, cell by cell."""
    said = []
    for cell, by in by_cell.items():
        check = by.get("core", {}).get("check")
        if check:
            logits = check.get("logits")
            verdict = (
                f", logits {'within T1' if logits['passed'] else 'BREAK T1'} of {logits['reference']}" if logits else ""
            )
            said.append(f"{cell}: tokens {'equal' if check['tokens_equal'] else 'differ'}{verdict}")
    if said:
        yield "Against eager: " + "; ".join(said) + "."
        yield ""


def kernels_of(cell: Document) -> Iterator[str]:
    """Yield the kernels of one layer of each kind, and of what belongs to none."""
    profile = cell["kernels"]
    yield f"### Kernels of {cell['name']}"
    yield ""
    for layer in profile["layers"]:
        yield f"{layer['name']}, {layer['count']} alike, {layer['us']:.1f} us each (floor {layer['floor_us']:.1f}):"
        yield ""
        rows = []
        for node in layer["nodes"]:
            names = ", ".join(f"{k['count']} x {k['name'][:40]}" for k in node["kernels"][:2])
            at_floor = f"{node['floor_us'] / node['us']:.0%}" if node["us"] else "-"
            rows.append(
                [f"`{node['op']}`", node["implementation"], f"`{names}`", f"{node['us']:.1f}", f"{node['share']:.1%}",
                 f"{node['floor_us']:.1f}", at_floor]
            )  # fmt: skip
        yield from table(["op", "becomes", "kernels", "us", "share", "floor us", "at floor"], rows)


def gains(document: Document) -> Iterator[str]:
    """Yield what each pass gains."""
    yield f"### What each pass gains: {document['preset']}"
    yield ""
    cells = list(dict.fromkeys(line["cell"] for line in document["lines"]))
    first = {line["cell"]: line for line in reversed(document["lines"]) if line["variant"] == "all passes"}
    variants = list(dict.fromkeys(line["variant"] for line in document["lines"]))
    found = {(line["variant"], line["cell"]): line for line in document["lines"]}
    rows = []
    for variant in variants:
        name = variant.removeprefix("without ")
        matches = "/".join(str(first[cell]["matched"].get(name, "")) for cell in cells).strip("/")
        lines = [found.get((variant, cell)) for cell in cells]
        rows.append([variant, matches, *(f"{line['replay_ms']:.3f}" if line else "-" for line in lines)])
    yield "Milliseconds of the captured graph; matches by cell:"
    yield ""
    yield from table(["variant", "matches", *cells], rows)


def kernels(document: Document) -> Iterator[str]:
    """Yield the table of kernels against others'."""
    lines = document["lines"]
    ways = [way for way in ("core", "torch", "flashinfer") if any(f"{way}_us" in line for line in lines)]
    columns = {way: f"{way}_us" for way in ways}
    others = " and ".join(NAMES[way] for way in ways if way != "core")
    yield f"## Kernels against {others}" if others else "## Kernels"
    yield ""
    yield "Microseconds of a call in a graph that goes through many sets of data; what is small stays in the L2 cache."
    yield f"The floor is bytes over a copy's bandwidth, {document['bandwidth'] / 1e12:.2f} TB/s."
    if any("flashinfer_plan_us" in line for line in lines):
        columns["plan"] = "flashinfer_plan_us"
        yield "FlashInfer's plan runs on the host, once for each step, outside of any capture, and stands apart."
    yield ""
    columns["floor"] = "floor_us"
    rows = [[line["op"], line["size"], *(us(line.get(column)) for column in columns.values())] for line in lines]
    yield from table(["op", "size", *(NAMES.get(name, name) for name in columns)], rows)


def page(folder: Path) -> str:
    """Return the page."""
    lines = ["# Performance", ""]
    notes = folder / "notes.md"
    if notes.is_file():
        lines += [notes.read_text().strip(), ""]
    for path in sorted(folder.glob("bench-*.json")):
        document = json.loads(path.read_text())
        lines += bench(document)
        plot = path.with_suffix(".svg")
        if plot.is_file():
            lines += [f"![{document['model']['title']}: the table as a plot]({folder.name}/{plot.name})", ""]
    for path in sorted(folder.glob("gains-*.json")):
        lines += gains(json.loads(path.read_text()))
    if (folder / "kernels.json").is_file():
        lines += kernels(json.loads((folder / "kernels.json").read_text()))
    return "\n".join(lines).rstrip() + "\n"


def main(folder: Path, out: Path = typer.Option(Path("docs/performance.md"), help="File to write.")) -> None:
    """Write the page."""
    if not any(folder.glob("bench-*.json")):
        raise typer.BadParameter(f"{folder} holds no bench-*.json: make one by core bench --json")
    out.write_text(page(folder))
    print(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)

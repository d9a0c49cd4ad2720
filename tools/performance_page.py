"""Write docs/performance.md from what was measured on one GPU: benches, gains of passes, kernels, start-up.

    python tools/performance_page.py docs/performance [--out docs/performance.md]

The folder holds `bench-PRESET.json` (core bench --json), and where they were made its plot `bench-PRESET.svg`,
`gains-PRESET.json` (benchmarks/pass_gains.py --json), `kernels.json` (tools/cuda/bench_cuda_kernels.py --out) and
`notes.md`, whose text the page begins with. Its folder `processor` holds what tools/processor_bench.py measured, its
folder `vllm` what tools/cuda/bench_beside_vllm.py did.
Every figure of the page comes from these files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from documentation.pages import table
from performance.processor import processor
from performance.vllm import beside_vllm

Document = Mapping[str, Any]

NAMES = {"core": "`core`", "torch": "torch", "flashinfer": "FlashInfer"}
"""Of the ways that kernels.json times."""


def ms(value: float | None) -> str:
    """Return milliseconds as text, three digits at least."""
    return "-" if value is None else f"{value:#.3g}" if value < 99.95 else f"{value:.1f}"


def us(value: float | None) -> str:
    """Return microseconds as text."""
    return "-" if value is None else f"{value:.2f}"


def figure(subject: Document | None, name: str = "ms") -> str:
    """Return a median with its spread, or why there is none."""
    if subject is None or subject[name] is None:
        return subject["failure"].split(":")[0] if subject and subject["failure"] else "-"
    found = subject[name]
    return f"{ms(found['median'])} ({ms(found['min'])} to {ms(found['max'])})"


def share(floor: float, subject: Document | None) -> str:
    """Return how much of a subject's median the floor is."""
    return f"{floor / subject['ms']['median']:.0%}" if subject is not None and subject["ms"] else "-"


def bench(document: Document) -> Iterator[str]:
    """Yield the section of one model."""
    model, rates, cells = document["model"], document["rates"], document["cells"]
    by_cell = {cell["name"]: {s["subject"]: s for s in cell["subjects"]} for cell in cells}
    subjects = list(dict.fromkeys(subject for by in by_cell.values() for subject in by))
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items() if number)
    others = f" transformers uses its attention `{model['attention']}`." if set(subjects) - {"core"} else ""
    given = " Others' figures were given to the run, not measured in it." if document["references"] else ""
    yield f"""\
## {model["title"]}

`{model["class"]}`, {model["num_parameters"] / 1e9:.2f} B parameters, {model["dtype"]}.{others}
Decode at context {document["settings"]["context"]}.
{document["device"]["product"]}, {document["started"][:10]}; {versions}.
Copies {rates["bytes_per_s"] / 1e12:.2f} TB/s, products {rates["flops_per_s"] / 1e12:.0f} TFLOP/s in this run.

Milliseconds, median over the rounds (least to most).{given}
"""
    core = [by.get("core") for by in by_cell.values()]
    floors = [cell["floor"]["ms"] for cell in cells]
    rows = [[f"`{name}`", *(figure(by.get(name)) for by in by_cell.values())] for name in subjects]
    rows.append(["`core`, the graph alone", *(figure(each, "replay_ms") for each in core)])
    for name, known in document["references"].items():
        rows.append([name, *(f"{known[cell]:g}" if cell in known else "-" for cell in by_cell)])
    rows.append(["floor", *map(ms, floors)])
    rows.append(["floor over `core`", *map(share, floors, core)])
    yield table(["", *by_cell], rows) + "\n"
    yield checks(dict(zip(by_cell, core, strict=True)))
    if document.get("start"):
        yield start(document["start"])
    yield from (kernels_of(cell) for cell in cells if cell["kernels"])


def start(document: Document) -> str:
    """Return the seconds from a process's start to the first token, by phase."""
    phases = list(dict.fromkeys(phase for way in document.values() for phase in way["phases"]))
    rows = [
        [name, *(f"{way['phases'].get(phase, 0.0):.2f}" for phase in phases), f"{way['total_s']:.1f}"]
        for name, way in document.items()
    ]
    told = "Seconds from the start of a process to the first token:"
    return f"{told}\n\n{table(['', *phases, 'together'], rows)}\n"


def checks(core: Mapping[str, Document | None]) -> str:
    """Return what the comparison of tokens and logits said of `core`, by cell: nothing judged is said too."""
    said = {cell: subject["check"] for cell, subject in core.items() if subject and subject["check"]}
    if not said:
        return "Tokens not compared, logits unjudged: `core` ran alone.\n"
    texts = (
        f"{cell}: tokens {'equal' if check['tokens_equal'] else 'differ'}, logits {verdict(check)}"
        for cell, check in said.items()
    )
    return f"Against eager: {'; '.join(texts)}.\n"


def verdict(check: Document) -> str:
    """Return how a comparison's logits stand: judged by T1, or unjudged and why."""
    logits = check.get("logits")
    if logits is None:
        return f"unjudged ({check.get('logits_skipped') or 'not asked for'})"
    if logits["passed"]:
        return f"within T1 of {logits['reference']}"
    # Where eager itself is this far off, its error is no bound for anybody's.
    unjudged = logits["reason"].startswith("the yardstick itself is off")
    return f"unjudged ({logits['reason']})" if unjudged else f"BREAK T1 of {logits['reference']}"


def kernels_of(cell: Document) -> str:
    """Return the kernels of one layer of each kind, and of what belongs to none."""
    text = f"### Kernels of {cell['name']}\n"
    for layer in cell["kernels"]["layers"]:
        each = f"{layer['us']:.1f} us each (floor {layer['floor_us']:.1f})"
        head = ["op", "becomes", "kernels", "us", "share", "floor us", "at floor"]
        text += f"\n{layer['name']}, {layer['count']} alike, {each}:\n\n{table(head, map(node_row, layer['nodes']))}\n"
    return text


def node_row(node: Document) -> list[str]:
    """Return a node's row: what it is, its kernels, its time and its floor."""
    names = ", ".join(f"{kernel['count']} x {kernel['name'][:40]}" for kernel in node["kernels"][:2])
    at_floor = f"{node['floor_us'] / node['us']:.0%}" if node["us"] else "-"
    figures = f"{node['us']:.1f}", f"{node['share']:.1%}", f"{node['floor_us']:.1f}"
    return [f"`{node['op']}`", node["implementation"], f"`{names}`", *figures, at_floor]


def gains(document: Document) -> str:
    """Return what each pass gains."""
    cells = list(dict.fromkeys(line["cell"] for line in document["lines"]))
    variants = list(dict.fromkeys(line["variant"] for line in document["lines"]))
    found = {(line["variant"], line["cell"]): line for line in document["lines"]}
    rows = []
    for variant in variants:
        name = variant.removeprefix("without ")
        matches = "/".join(str(found["all passes", cell]["matched"].get(name, "")) for cell in cells).strip("/")
        lines = [found.get((variant, cell)) for cell in cells]
        rows.append([variant, matches, *(f"{line['replay_ms']:.3f}" if line else "-" for line in lines)])
    unjudged = " Logits unjudged." if document.get("quantize") else ""
    return f"""\
### What each pass gains: {document["preset"]}

Milliseconds of the captured graph. Matches are listed by cell, as the columns are.{unjudged}

{table(["variant", "matches", *cells], rows)}
"""


def kernels(document: Document) -> str:
    """Return the table of kernels against others'."""
    lines = document["lines"]
    ways = [way for way in NAMES if any(f"{way}_us" in line for line in lines)]
    columns = {way: f"{way}_us" for way in ways}
    others = " and ".join(NAMES[way] for way in ways if way != "core")
    plan = ""
    if any("flashinfer_plan_us" in line for line in lines):
        columns["plan"] = "flashinfer_plan_us"
        plan = "FlashInfer's plan runs on the host, once for each step, outside of any capture, and stands apart.\n"
    columns["floor"] = "floor_us"
    rows = [[line["op"], line["size"], *(us(line.get(column)) for column in columns.values())] for line in lines]
    return f"""\
## Kernels{f" against {others}" if others else ""}

Microseconds of a call, in a graph of calls on many sets of data; data of small sizes still stays in the L2 cache.
The floor is bytes over a copy's bandwidth, {document["bandwidth"] / 1e12:.2f} TB/s.
{plan}
{table(["op", "size", *(NAMES.get(name, name) for name in columns)], rows)}
"""


def page(folder: Path) -> str:
    """Return the page."""
    notes = folder / "notes.md"
    lines = ["# Performance\n", *([notes.read_text().strip() + "\n"] if notes.is_file() else [])]
    for path in sorted(folder.glob("bench-*.json")):
        document = json.loads(path.read_text())
        lines += bench(document)
        plot = path.with_suffix(".svg")
        if plot.is_file():
            lines.append(f"![{document['model']['title']}: the table as a plot]({folder.name}/{plot.name})\n")
    lines += [gains(json.loads(path.read_text())) for path in sorted(folder.glob("gains-*.json"))]
    if (folder / "kernels.json").is_file():
        lines.append(kernels(json.loads((folder / "kernels.json").read_text())))
    lines += [beside_vllm(folder / "vllm"), processor(folder / "processor")]
    return "\n".join(lines).rstrip() + "\n"


def main(folder: Path, out: Path = typer.Option(Path("docs/performance.md"), help="File to write.")) -> None:
    """Write the page."""
    if not any(folder.glob("bench-*.json")):
        raise typer.BadParameter(f"{folder} holds no bench-*.json: make one by core bench --json")
    out.write_text(page(folder))
    print(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)

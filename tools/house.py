"""How the code of a checkout is laid out, in figures: `python tools/house.py [CHECKOUT] [--json] [--run]`.

Sizes of folders, files and functions, circles of imports, what each graph pass imports, and with `--run` the modules
that take part between `core run` and its first captured replay. The checkout is read, not imported, so it may be an
older one; only `--run` starts its command.
"""

from __future__ import annotations

import ast
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import typer

from import_graph import Module, arrows, between_rooms, circles, imports, read_modules, rooms
from run_modules import modules_of_a_run

PASSES = "core/common/passes"
OPS = "core/common/ops"
LIST_OF_PASSES = "core.common.passes.standard"
SIDES = ("framework", "ops", "family", "other")


def measure(root: Path, *, run: bool = False) -> dict[str, Any]:
    """Return all figures of a checkout as JSON-ready values; run: those of a run too."""
    modules = read_modules(root)
    code = {name: module for name, module in modules.items() if not is_test(module)}
    found: dict[str, Any] = {
        "schema": "core.house/1",
        "folders": folders(modules.values()),
        "areas": areas(modules.values()),
        "file_lines": spread({m.path.as_posix(): num_lines(m) for m in code.values()}),
        "function_lines": spread(dict(pair for module in code.values() for pair in function_lines(module))),
        "loose_in_core": sorted(m.path.name for m in code.values() if m.folder == "core"),
        "fullest_folder": fullest(code.values()),
        "circles": circles(arrows(modules)),
        "room_circles": circles(between_rooms(arrows(code), rooms(code))),
        "passes": pass_imports(code),
    }
    if run:
        opened = modules_of_a_run(root)
        found["run"] = {"num_modules": len(opened), "rooms": dict(Counter(map(_folder, opened))), "modules": opened}
    return found


def is_test(module: Module) -> bool:
    """Tell whether a module is part of a test suite."""
    return "tests" in module.path.parts


def num_lines(module: Module) -> int:
    """Return the lines of a file, empty ones and comments included."""
    return len(module.text.splitlines())


def num_statements(module: Module) -> int:
    """Return the statements of a file, docstrings left out: they are text."""
    return sum(isinstance(node, ast.stmt) and not _is_text(node) for node in ast.walk(module.tree))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def function_lines(module: Module) -> Iterator[tuple[str, int]]:
    """Yield each function, as `path:line name`, with its lines; decorators do not count."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield f"{module.path}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1


def spread(values: Mapping[str, int]) -> dict[str, Any]:
    """Return number, median, 95th percentile and maximum, with what is largest."""
    ordered = sorted(values.values())
    largest = max(values, key=lambda name: values[name])
    p95 = ordered[-(-95 * len(ordered) // 100) - 1]  # nearest rank
    median = statistics.median(ordered)
    return {"num": len(ordered), "median": median, "p95": p95, "max": ordered[-1], "largest": largest}


def folders(modules: Iterable[Module]) -> dict[str, dict[str, int]]:
    """Return files, lines and statements of each folder, subfolders apart."""
    return _sums((module.folder, module) for module in modules)


def areas(modules: Iterable[Module]) -> dict[str, dict[str, int]]:
    """Return files, lines and statements of each area: core by its subfolders, the rest by its first folders."""
    return _sums((_area(module), module) for module in modules)


def _area(module: Module) -> str:
    if is_test(module):
        return "tests, also of plugins and examples"
    parts = module.path.parent.parts
    return "/".join(parts[:2] if parts[0] in ("core", "plugins") else parts[:1])


def _sums(pairs: Iterable[tuple[str, Module]]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for name, module in pairs:
        sums = found.setdefault(name, {"files": 0, "lines": 0, "statements": 0})
        sums["files"] += 1
        sums["lines"] += num_lines(module)
        sums["statements"] += num_statements(module)
    return dict(sorted(found.items()))


def fullest(modules: Iterable[Module]) -> dict[str, Any]:
    """Return the folder that holds the most files, and how many."""
    ((folder, count),) = Counter(module.folder for module in modules).most_common(1)
    return {"folder": folder, "files": count}


def pass_imports(modules: Mapping[str, Module]) -> dict[str, dict[str, int]]:
    """Return, of each file that the list of common passes takes one from, how many modules of core it imports.

    framework: modules that lie loose in core/common/passes; family: those in its subfolders; ops: of core/common/ops;
    other: the rest of core.
    """
    listed = modules.get(LIST_OF_PASSES)
    files = set() if listed is None else {name for name, _ in imports(modules, listed)}
    found = {}
    for name in files:
        module = modules[name]
        if module.path.is_relative_to(PASSES) and module.folder != PASSES:
            targets = {target for target, _ in imports(modules, module) if modules[target].path.parts[0] == "core"}
            sides = Counter(_side(modules[target]) for target in targets)
            found[module.path.as_posix()] = {side: sides[side] for side in SIDES} | {"all": len(targets)}
    return dict(sorted(found.items()))


def _side(target: Module) -> str:
    if target.folder == PASSES:
        return "framework"
    return next(
        (side for side, folder in (("family", PASSES), ("ops", OPS)) if target.path.is_relative_to(folder)), "other"
    )


def _folder(path: str) -> str:
    return PurePosixPath(path).parent.as_posix()


def to_text(found: Mapping[str, Any]) -> str:
    """Return the figures for a reader."""
    lines = [f"{'':<38}{'files':>7}{'lines':>9}{'statements':>12}"]
    for name, sums in found["areas"].items():
        lines.append(f"{name:<38}{sums['files']:>7}{sums['lines']:>9}{sums['statements']:>12}")
    lines += ["", "tests left out:"]
    for what in ("file_lines", "function_lines"):
        each = found[what]
        text = f"median {each['median']:g}, p95 {each['p95']}, max {each['max']} ({each['largest']})"
        lines.append(f"  {what.replace('_', ' '):<26}{text}, of {each['num']}")
    full = found["fullest_folder"]
    lines.append(f"  {'loose at the top of core':<26}{len(found['loose_in_core'])}")
    lines.append(f"  {'files in a folder, max':<26}{full['files']} ({full['folder']})")
    lines.append(f"  {'circles of modules':<26}{len(found['circles'])}")
    lines += [f"    {' <-> '.join(members)}" for members in found["circles"]]
    lines.append(f"  {'circles of rooms':<26}{len(found['room_circles'])}")
    lines += [f"    {' <-> '.join(members)}" for members in found["room_circles"]]
    lines += _pass_lines(found["passes"])
    if "run" in found:
        lines += ["", f"modules on the way from `core run` to its first captured replay: {found['run']['num_modules']}"]
        lines += [f"  {room:<40}{count:>4}" for room, count in sorted(found["run"]["rooms"].items())]
        lines += [f"    {path}" for path in found["run"]["modules"]]
    return "\n".join(lines)


def _pass_lines(passes: Mapping[str, Mapping[str, int]]) -> list[str]:
    sides = (*SIDES, "all")
    lines = ["", f"modules of core that a pass's file imports{'':<16}" + "".join(f"{side:>10}" for side in sides)]
    for path, counts in passes.items():
        lines.append(f"  {path:<56}" + "".join(f"{counts[side]:>10}" for side in sides))
    middle = [statistics.median(counts[side] for counts in passes.values()) for side in sides if passes]
    return [*lines, f"  {'median':<56}" + "".join(f"{value:>10g}" for value in middle)]


def main(
    checkout: Path = typer.Argument(Path(__file__).resolve().parents[1], help="Folder of a checkout; default: this."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
    run: bool = typer.Option(False, "--run", help="Start `core run` too, and list the modules that take part."),
) -> None:
    """Print how the code of a checkout is laid out, in figures."""
    found = measure(checkout.resolve(), run=run)
    print(json.dumps(found, indent=2) if as_json else to_text(found))


if __name__ == "__main__":
    typer.run(main)

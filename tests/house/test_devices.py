"""No device name stands under core/, and nothing there asks what kind a device is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.house.rules import Files, Rule, modules, proofs, sources

# Not after a letter: "input" is a word. The whole text counts: names, strings, docstrings and comments.
DEVICE_NAME = re.compile(r"(?<![A-Za-z])(?:cuda|npu)", re.IGNORECASE)
# Files under core/ that may name a device, each with its reason. Examples in help texts say `cpu` or `acme`.
MAY_NAME_DEVICES: dict[str, str] = {}
# Device types of torch and its best-known guests: text that nothing under core/ may branch on. Of them core/ may still
# say `cpu` where it asks for the host's memory, as in `tensor.to("cpu")`.
KINDS_OF_DEVICE = {"cpu", "cuda", "hpu", "meta", "mps", "mtia", "musa", "npu", "xla", "xpu"}
TELLS_TEXTS_APART = {"startswith", "endswith", "get", "fullmatch", "match"}


def host_names_no_device(root: Path) -> list[str]:
    return [
        f"{path}:{number} says {match.group()!r}"
        for path, text in sources(root, "core")
        if path not in MAY_NAME_DEVICES
        for number, line in enumerate(text.splitlines(), start=1)
        for match in DEVICE_NAME.finditer(line)
    ]


def host_asks_no_device_type(root: Path) -> list[str]:
    """Find branches on what kind a device is: on its `.type`, on a name given to that, on a literal, on `x.is_cpu`."""
    return [
        f"{module.path}:{line} {how}"
        for module in modules(root, "core").values()
        for line, how in _questions_of_kind(module.tree)
    ]


def _questions_of_kind(tree: ast.AST) -> Iterator[tuple[int, str]]:
    nodes = list(ast.walk(tree))
    assigned = [node for node in nodes if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr)]
    targets = [
        target
        for node in assigned
        if isinstance(node.value, ast.Attribute) and node.value.attr == "type"
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    types = {target.id for target in targets if isinstance(target, ast.Name)}
    for node in nodes:
        operands = [part for part in _compared(node) for part in ast.walk(part)]
        if any(_is_type(part, types) for part in operands):
            yield node.lineno, "branches on a device's type"  # type: ignore[attr-defined]
        elif literals := sorted(KINDS_OF_DEVICE & {part.value for part in operands if isinstance(part, ast.Constant)}):
            yield node.lineno, f"branches on the device {literals[0]!r}"  # type: ignore[attr-defined]
        elif isinstance(node, ast.Attribute) and node.attr.removeprefix("is_") in KINDS_OF_DEVICE - {node.attr}:
            yield node.lineno, f"asks {node.attr!r}"


def _compared(node: ast.AST) -> list[ast.AST]:
    """Return what a comparison, a `match`, a case, a subscript or a call that tells texts apart looks at."""
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    if isinstance(node, ast.Match):
        return [node.subject]
    if isinstance(node, ast.MatchValue):
        return [node.value]
    if isinstance(node, ast.Subscript):
        return [node.slice]
    if isinstance(node, ast.Dict):
        return [key for key in node.keys if key is not None]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TELLS_TEXTS_APART:
        return list(node.args)
    return []


def _is_type(part: ast.AST, types: set[str]) -> bool:
    if isinstance(part, ast.Name):
        return part.id in types
    # `Tensor.type` is the method of that name.
    return isinstance(part, ast.Attribute) and part.attr == "type" and ast.unparse(part.value) != "Tensor"


PLANTED: dict[Rule, list[Files]] = {
    host_names_no_device: [
        {"core/a.py": "x = torch.cuda.memory_allocated()"},
        {"core/a.py": "if torch.npu: pass"},
        {"core/a.py": "x = 'cuda:0'"},
        {"core/a.py": "if y.is_cuda: pass"},
        {"core/a.py": '"""Wraps an NPUGraph."""'},
        {"core/cli/a.py": "x = 1  # as on CUDA"},
    ],
    host_asks_no_device_type: [
        {"core/a.py": "if tensor.device.type == 'xpu': pass"},
        {"core/a.py": "x = name in torch.device(name).type"},
        {"core/a.py": "match device.type:\n    case 'x': pass"},
        {"core/a.py": "kind = tensor.device.type\nown = kind == name"},
        {"core/a.py": "if (kind := x.device.type) and kind in known: pass"},
        {"core/a.py": "x = device == 'cpu' or f(device)"},
        {"core/a.py": "x = tensor.device == torch.device('cpu')"},
        {"core/a.py": "x = str(device) in ('cpu', 'acme')"},
        {"core/a.py": "match name:\n    case 'x' | 'mps': pass"},
        {"core/a.py": "x = {'xpu': 1}"},
        {"core/a.py": "x = sizes['xpu']"},
        {"core/a.py": "x = name.startswith('cpu')"},
        {"core/a.py": "x = 1 if tensor.is_cpu else 2"},
    ],
}
INNOCENT: dict[Rule, list[Files]] = {
    host_names_no_device: [{"core/a.py": "input = 'an input of a barracuda'"}],
    host_asks_no_device_type: [
        {
            "core/a.py": "x = node.type\nif type(y) is int or f in (Tensor.to, Tensor.type): pass",
            "core/b.py": "x = y.to('cpu')\nz = torch.device('cpu')\nw = cpu.meta == 1",
        }
    ],
}

test_this_tree_keeps_the_rule, test_a_planted_violation_is_found, test_the_innocent_pass = proofs(PLANTED, INNOCENT)

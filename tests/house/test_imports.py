"""Who may import whom: core no plugin, core.common nothing above it, plugins the contract and nothing else of core."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from import_graph import Module
from tests.house.rules import ROOT, Files, Rule, imports, modules, proofs, sources, within

COMMON_MAY_IMPORT = ("core.common", "core.errors", "core.probe", "core.capabilities", "core._version")
"""What core/common may import of core, `if TYPE_CHECKING` or not."""
PLUGINS_MAY_IMPORT = (
    "core.accelerator",
    "core.capabilities",
    "core.common.conformance",
    "core.common.fakes",
    "core.common.graphs",
    "core.common.inductor",
    "core.common.kernel_compilers",
    "core.common.lowering",
    "core.common.numerics",
    "core.common.ops",
    "core.common.passes",
    "core.common.peers",
    "core.common.telling",
    "core.common.under_way",
    "core.device",
    "core.errors",
    "core.hookspecs",
    "core.kernel_folder",
    "core.probe",
)
"""The contract: what the package of a plugin may import of core, ours, the example's and what the scaffold writes."""
TESTS_OF_PLUGINS_MAY_IMPORT = (
    *PLUGINS_MAY_IMPORT,
    "core.compilation.rewrite.aten",
    "core.compilation.rewrite.manager",
    "core.compilation.rewrite.pass_report",
    "core.compilation.trace.traced",
    "core.compilation.trace.tracing",
    "core.verify.compare",
    "core.verify.planted",
    "core.verify.verify",
)
"""By what else vendors prove their passes and ops: the tests of the example and those that the scaffold writes."""
TEMPLATES = "core/scaffold/templates"


def plugin_packages(root: Path) -> dict[str, str]:
    """Return the folders of the plugins in the tree by package."""
    return {path.name: path.relative_to(root).as_posix() for path in sorted((root / "plugins").glob("*/core_*"))}


def host_imports_no_plugin(root: Path) -> list[str]:
    return [
        f"{path}:{line} imports {name}"
        for path, line, name in imports(root, "core")
        if name.partition(".")[0].startswith("core_")
    ]


def common_stands_alone(root: Path) -> list[str]:
    return [
        f"{path}:{line} imports {name}"
        for path, line, name in imports(root, "core/common")
        if within(name, ("core",)) and not within(name, COMMON_MAY_IMPORT)
    ]


def plugins_are_strangers(root: Path) -> list[str]:
    packages = plugin_packages(root)
    return [
        f"{path}:{line} imports {name}"
        for package, folder in packages.items()
        for path, line, name in imports(root, folder)
        if name.partition(".")[0] in packages.keys() - {package}
    ]


def nobody_imports_the_plugins_folder(root: Path) -> list[str]:
    return [f"{path}:{line} imports {name}" for path, line, name in imports(root) if within(name, ("plugins",))]


def plugins_keep_to_the_contract(root: Path) -> list[str]:
    folders = [*plugin_packages(root).values(), "examples/acme_device", TEMPLATES]
    return [
        f"{path}:{line} imports {name}, which the contract does not hold"
        for folder in folders
        for path, line, name in (_template_imports(root) if folder == TEMPLATES else imports(root, folder))
        if within(name, ("core",)) and not within(name, _allowed(path))
    ]


def _allowed(path: str) -> tuple[str, ...]:
    return TESTS_OF_PLUGINS_MAY_IMPORT if "tests" in PurePosixPath(path).parts else PLUGINS_MAY_IMPORT


def _template_imports(root: Path) -> Iterator[tuple[str, int, str]]:
    """Yield path, line and name of the imports of what the scaffold writes: names put in, conditions left out."""
    for path in sorted((root / TEMPLATES).rglob("*.py.jinja")):
        text = re.sub(r"{%.*?%}", "", path.read_text(encoding="utf-8"))
        text = re.sub(r"{{\s*(\w+).*?}}", r"\1", text)
        relative = PurePosixPath(path.relative_to(root).as_posix())
        found = Module("template", relative, ast.parse(text), text).imported
        yield from ((relative.as_posix(), line, name) for name, line in found)


def transformers_is_asked_for(root: Path) -> list[str]:
    """Importing a module imports no transformers: it is optional, and slow where `import_transformers` is not asked."""
    shipped = ("core", *plugin_packages(root).values(), "conformance/core_conformance")
    return [
        f"{path}:{statement.lineno} imports transformers at once"
        for path, text in sources(root, *shipped)
        for statement in ast.parse(text).body
        if isinstance(statement, ast.Import | ast.ImportFrom)
        and any(within(name, ("transformers",)) for name in _named(statement))
    ]


def _named(statement: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(statement, ast.Import):
        return [each.name for each in statement.names]
    return [statement.module or ""] if statement.level == 0 else []


PLANTED: dict[Rule, list[Files]] = {
    host_imports_no_plugin: [
        {"core/a.py": "def f():\n    import core_cpu.runner"},
        {"core/a.py": "from core_cuda import ops"},
        {"core/cli/a.py": "from importlib import import_module\nimport_module('core_acme.plugin')"},
    ],
    common_stands_alone: [
        {"core/common/a.py": "import core.host.selection"},
        {"core/common/graphs/a.py": "from core import compile"},
        {"core/common/a.py": "from core.device import Device"},
        {"core/common/a.py": "from .. import device"},
        {"core/common/a.py": "if TYPE_CHECKING:\n    from core.device import Device"},
        {"core/common/a.py": "if TYPE_CHECKING:\n    from core.compilation.program import Program"},
    ],
    plugins_are_strangers: [
        {"plugins/x/core_x/a.py": "from core_y.ops import f", "plugins/y/core_y/ops.py": ""},
    ],
    transformers_is_asked_for: [
        {"core/a.py": "from transformers import GenerationConfig"},
        {"plugins/x/core_x/a.py": "import torch, transformers.utils"},
    ],
    nobody_imports_the_plugins_folder: [{"tests/a.py": "import plugins.cpu"}, {"core/a.py": "from plugins import x"}],
    plugins_keep_to_the_contract: [
        {"plugins/x/core_x/a.py": "from core import compile"},
        {"plugins/x/core_x/ops/a.py": "def f():\n    from core.host.selection import select_device"},
        {"plugins/x/core_x/a.py": "if TYPE_CHECKING:\n    from core.compilation.program import Program"},
        {"plugins/x/core_x/a.py": "from core.common.fp64 import exact"},
        {"examples/acme_device/core_acme/a.py": "import core.settings"},
        {"examples/acme_device/tests/a.py": "from core.engine.serve.engine import Engine"},
        {f"{TEMPLATES}/package/a.py.jinja": "import core.settings"},
        {f"{TEMPLATES}/package/a.py.jinja": "from core.compilation.trace.tracing import trace"},
        {f"{TEMPLATES}/tests/a.py.jinja": "{% if x %}\nfrom {{ package }} import core\n{% endif %}import core.cli"},
    ],
}
INNOCENT: dict[Rule, list[Files]] = {
    host_imports_no_plugin: [{"core/a.py": "from core.errors import CoreError"}],
    common_stands_alone: [
        {"core/common/a.py": "import torch\nif TYPE_CHECKING:\n    from core.capabilities import Mode"}
    ],
    transformers_is_asked_for: [
        {"core/a.py": "def f():\n    import transformers\nif TYPE_CHECKING:\n    from transformers import Cache"},
        {"tests/a.py": "import transformers"},
    ],
    plugins_are_strangers: [{"plugins/x/core_x/a.py": "import core_x.b\nfrom core.errors import CoreError"}],
    plugins_keep_to_the_contract: [
        {"plugins/x/core_x/a.py": "from core.common.passes import view\nimport core_x.b\nfrom core.device import Mode"},
        {"plugins/x/tests/a.py": "from core.engine.serve.engine import Engine"},
        {"examples/acme_device/tests/a.py": "from core.compilation.trace.tracing import trace"},
        {f"{TEMPLATES}/package/a.py.jinja": "from core.hookspecs import hookimpl\nx = {{ names.device }}"},
    ],
}

test_this_tree_keeps_the_rule, test_a_planted_violation_is_found, test_the_innocent_pass = proofs(PLANTED, INNOCENT)


def test_the_rules_see_files() -> None:
    assert len(list(sources(ROOT, "core"))) > 20
    assert set(plugin_packages(ROOT)) == {"core_cpu", "core_cuda", "core_npu"}
    assert len({path for path, _, _ in _template_imports(ROOT)}) > 10
    assert modules(ROOT, "examples/acme_device").keys() >= {"core_acme.plugin"}


def test_the_contract_holds_no_module_that_no_plugin_takes() -> None:
    folders = [*plugin_packages(ROOT).values(), "examples/acme_device"]
    taken = [name for folder in folders for _, _, name in imports(ROOT, folder)]
    taken += [name for _, _, name in _template_imports(ROOT)]
    idle = [each for each in TESTS_OF_PLUGINS_MAY_IMPORT if not any(within(name, (each,)) for name in taken)]
    assert idle == ["core.capabilities"]  # they take it from core.device, which hands it on

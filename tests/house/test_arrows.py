"""Arrows between modules and between rooms: no circle anywhere, and within core each room imports lower layers only."""

from __future__ import annotations

from pathlib import Path

from import_graph import HALLS, arrows, between_rooms, circles, imports, rooms
from tests.house.rules import ROOT, SOURCE_FOLDERS, Files, Rule, modules, proofs

LAYERS: tuple[tuple[str, ...], ...] = (
    ("core/_version.py", "core/capabilities.py", "core/errors.py", "core/probe.py"),
    ("core/paths.py",),
    ("core/common/under_way.py",),
    (
        "core/settings.py",
        "core/common/__init__.py",
        "core/common/collector.py",
        "core/common/conformance.py",
        "core/common/fp64.py",
        "core/common/given.py",
        "core/common/kernel_compilers.py",
        "core/common/lowering.py",
        "core/common/node_meta.py",
        "core/common/number_runs.py",
        "core/common/passes/effects.py",
        "core/common/peers.py",
        "core/common/telling.py",
    ),
    ("core/common/graphs", "core/common/numerics.py"),
    ("core/common/ops",),
    ("core/common/passes",),
    ("core/common/fakes", "core/common/inductor.py"),
    ("core/device.py",),
    ("core/hookspecs.py",),
    ("core/accelerator",),
    ("core/host",),
    ("core/scaffold",),
    (
        "core/compilation/__init__.py",
        "core/compilation/implementations.py",
        "core/compilation/trace",
    ),
    (
        "core/compilation/capture",
        "core/compilation/rewrite",
        "core/compilation/shared_trace.py",
        "core/compilation/timed_calls.py",
    ),
    ("core/compilation/measuring.py", "core/compilation/options.py"),
    (
        "core/compilation/arguments.py",
        "core/compilation/oversized.py",
        "core/compilation/training.py",
        "core/compilation/weights.py",
    ),
    ("core/compilation/report.py", "core/compilation/request.py"),
    ("core/compilation/account.py", "core/compilation/calls.py", "core/verify"),
    ("core/compilation/eager.py",),
    ("core/compilation/program.py", "core/compilation/rewriting.py", "core/verify/fakes"),
    ("core/compilation/cache",),
    ("core/compilation/phases", "core/kernel_folder.py"),
    ("core/compilation",),
    ("core/dynamo",),
    ("core/quantization",),
    ("core/engine/__init__.py", "core/engine/config.py", "core/engine/models"),
    (
        "core/engine/held.py",
        "core/engine/patience.py",
        "core/engine/heads",
        "core/engine/inspect",
        "core/engine/parallel",
    ),
    ("core/engine/lora",),
    ("core/engine/steps",),
    ("core/engine/static",),
    ("core/engine/paged", "core/engine/recompute"),
    ("core/engine/serve",),
    ("core/__init__.py", "core/engine/check", "core/engine/http"),
    ("core/engine/replicas", "core/explain", "core/verify/bisect"),
    ("core/bench",),
    ("core/cli",),
    ("core/__main__.py",),
)
"""From low to high: files, and folders with all that is below them unless it is named apart. Those of one layer do not
import each other."""


def no_import_circle(root: Path) -> list[str]:
    return [" <-> ".join(members) for members in circles(arrows(modules(root)))]


def no_circle_of_rooms(root: Path) -> list[str]:
    """Find circles between folders, the tests' own left out; modules of halls count each for itself."""
    house = modules(root, *(folder for folder in SOURCE_FOLDERS if folder != "tests"))
    found = {name: module for name, module in house.items() if "tests" not in module.path.parts}
    return [" <-> ".join(members) for members in circles(between_rooms(arrows(found), rooms(found)))]


def arrows_point_down(root: Path) -> list[str]:
    """Find imports within core that go up or across, and modules that no layer holds."""
    house = modules(root, "core")
    places = {name: _place(module.path.as_posix()) for name, module in house.items()}
    strays = [f"{house[name].path} is in no layer" for name, place in places.items() if place is None]
    return strays + [
        f"{module.path}:{line} imports {target}, which is no lower"
        for name, module in house.items()
        for target, line in imports(house, module)
        if not _is_down(places[name], places[target])
    ]


def _place(path: str) -> tuple[int, str] | None:
    """Return the layer of a file and the entry that holds it: the one that names most of its path."""
    holding = [
        (len(entry), level, entry)
        for level, entries in enumerate(LAYERS)
        for entry in entries
        if path == entry or path.startswith(f"{entry}/")
    ]
    return max(holding)[1:] if holding else None


def _is_down(place: tuple[int, str] | None, target: tuple[int, str] | None) -> bool:
    return place is None or target is None or place[1] == target[1] or target[0] < place[0]


PLANTED: dict[Rule, list[Files]] = {
    no_import_circle: [
        {"core/a.py": "import core.b", "core/b.py": "def f():\n    from core.a import x"},
        {"core/a.py": "from core import b", "core/b.py": "from core.c import y", "core/c.py": "import core.a"},
        {"core/a.py": "import core.b", "core/b.py": "if TYPE_CHECKING:\n    from core.a import x"},
        {"core/a.py": "import core.b", "core/b.py": "from importlib import import_module\nimport_module('core.a')"},
        {"core/__init__.py": "", "core/x/__init__.py": "from core.x.a import y", "core/x/a.py": "from core.x import z"},
        {
            "plugins/x/core_x/__init__.py": "",
            "plugins/x/core_x/a.py": "from core_x import b",
            "plugins/x/core_x/b.py": "from core_x.a import f",
        },
        {"tools/a.py": "import b", "tools/b.py": "import a"},
        {"tests/a.py": "from tests.x.b import y", "tests/x/b.py": "from tests.a import z"},
    ],
    no_circle_of_rooms: [
        {"core/x/a.py": "import core.y.b", "core/y/b.py": "", "core/y/c.py": "import core.x.d", "core/x/d.py": ""},
        {
            "core/engine/x/a.py": "from core.engine import b",
            "core/engine/b.py": "def f():\n    import core.engine.x.c",
            "core/engine/x/c.py": "",
        },
    ],
    arrows_point_down: [
        {"core/errors.py": "if TYPE_CHECKING:\n    from core.device import Device", "core/device.py": ""},
        {"core/errors.py": "import core.probe", "core/probe.py": ""},
        {"core/host/a.py": "def f():\n    from core.cli.output import error_json", "core/cli/output.py": ""},
        {"core/verify/a.py": "import core.verify.bisect.b", "core/verify/bisect/b.py": ""},
        {"core/compilation/cache/a.py": "import core.compilation.new", "core/compilation/new.py": ""},
        {"core/stray.py": ""},
    ],
}
INNOCENT: dict[Rule, list[Files]] = {
    no_import_circle: [
        {"core/a.py": "import core.b\nimport core.c", "core/b.py": "import core.c", "core/c.py": "import torch"},
        {"tools/a.py": "import b", "tools/b.py": "import core.a", "core/a.py": "import b"},
        {"tools/a.py": "import b", "tools/b.py": "", "tests/b.py": "import a"},
    ],
    no_circle_of_rooms: [
        {"core/x/a.py": "import core.y.b", "core/y/b.py": "import core.y.c", "core/y/c.py": ""},
        {
            "core/engine/x/a.py": "import core.engine.b",
            "core/engine/b.py": "",
            "core/engine/c.py": "import core.engine.x.a",
        },
        {"plugins/x/tests/a.py": "import core.x.a", "core/x/a.py": ""},
    ],
    arrows_point_down: [
        {"core/cli/a.py": "import core.cli.b\nimport core.errors", "core/cli/b.py": "", "core/errors.py": ""},
        {"core/compilation/new.py": "import core.compilation.cache.a", "core/compilation/cache/a.py": ""},
    ],
}

test_this_tree_keeps_the_rule, test_a_planted_violation_is_found, test_the_innocent_pass = proofs(PLANTED, INNOCENT)


def test_every_layer_and_hall_is_there() -> None:
    named = [*HALLS, *(entry for entries in LAYERS for entry in entries)]
    assert [path for path in named if not (ROOT / path).exists()] == []

"""core/engine/models/importing.py: what transformers is imported without, and in which process."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from core.engine.models.importing import packages_distributions

pytest.importorskip("transformers", reason="needs the extra 'hf'")

STARTS = """
import json, sys
from core.common.collector import own_process
from core.engine.models.hf import import_transformers
own_process(own=sys.argv[1] == "own")
if "early" in sys.argv:  # somebody's `import transformers`, which has asked for both packages
    import transformers
_ = import_transformers().PreTrainedModel
from transformers.generation import GenerationMixin
before = sorted({"scipy", "sklearn"} & sys.modules.keys())
from transformers.utils import is_scipy_available, is_sklearn_available
import scipy
print(json.dumps([before, is_scipy_available(), is_sklearn_available(), scipy.__version__]))
"""
IN_USE = {
    "scipy/__init__.py": "__version__ = '1.16.0'\n",
    "scipy/optimize.py": "linear_sum_assignment = None\n",
    "scipy/stats.py": "",
    "sklearn/__init__.py": "",
    "sklearn/metrics.py": "roc_curve = None\n",
    "scipy-1.16.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: scipy\nVersion: 1.16.0\n",
    "scikit_learn-1.7.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: scikit-learn\nVersion: 1.7.0\n",
    "scikit_learn-1.7.0.dist-info/top_level.txt": "sklearn\n",
}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.slow  # imports transformers in a process of its own
@pytest.mark.parametrize("before", [(), ("early",)], ids=["alone", "after its import"])
@pytest.mark.parametrize("whose", ["own", "a caller's"])
def test_a_command_does_not_pay_for_what_only_others_use(whose: str, before: tuple[str, ...], tmp_path: Path) -> None:
    write(tmp_path, IN_USE)
    found = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [sys.executable, "-c", STARTS, whose, *before]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": found})
    assert done.returncode == 0, done.stderr
    there, *afterwards = json.loads(done.stdout)
    assert ("scipy" in there) == (whose != "own") and ("sklearn" not in there or whose != "own")
    assert afterwards == [True, True, "1.16.0"], "what is hidden for the import is there again"


def test_distributions_of_packages_are_those_of_the_library() -> None:
    ours, theirs = packages_distributions(), importlib.metadata.packages_distributions()
    assert {name: sorted(ours[name]) for name in theirs} == {name: sorted(found) for name, found in theirs.items()}


def test_top_names_come_from_the_record_and_a_damaged_distribution_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = (
        "wide/a.py",
        "wide/b.py",
        "single.py",
        "../../bin/tool",
        "lost/c.py",
        '"odd, name/d.py"',
        "wide-1.dist-info/RECORD",
    )
    write(
        tmp_path,
        {
            "wide/a.py": "",
            "single.py": "",
            "wide-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: Wide\nVersion: 1\n",
            "wide-1.dist-info/RECORD": "".join(f"{name},,\n" for name in held),
            "stated-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: stated\nVersion: 1\n",
            "stated-1.dist-info/top_level.txt": "one\nwide\n",
        },
    )
    write(tmp_path, {"broken-1.dist-info/METADATA": "Name: broken\n"})
    (tmp_path / "broken-1.dist-info/top_level.txt").write_bytes(b"\xff\xfe")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = packages_distributions()
    assert {name: sorted(distributions) for name, distributions in found.items()} == {
        "wide": ["Wide", "stated"],
        "single": ["Wide"],
        "one": ["stated"],
    }

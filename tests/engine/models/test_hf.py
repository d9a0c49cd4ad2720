"""How transformers is imported: its files are listed once, and what it offers is the same."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("transformers", reason="needs the extra 'hf'")

FRESH = """
import json, sys
opened = []
sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)
from core.engine.models.hf import import_transformers
import_transformers()
reads = sum(name.endswith("modeling_albert.py") for name in opened)
models = sys.modules["transformers.models"]
from transformers.utils import import_utils
listed = import_utils.define_import_structure(models.__file__)
again = import_utils._LazyModule(models.__name__, models.__file__, listed, module_spec=models.__spec__)
names = ("_import_structure", "_modules", "_class_to_module", "_object_missing_backend")
found = {name: getattr(models, name) == getattr(again, name) and len(getattr(models, name)) for name in names}
found["__all__"] = sorted(models.__all__) == sorted(again.__all__)
print(json.dumps({"reads": reads, "more": sum(name.endswith("modeling_albert.py") for name in opened), **found}))
"""


def test_the_files_of_the_models_are_listed_once_and_all_of_them() -> None:
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert (found.pop("reads"), found.pop("more")) == (1, 2)  # the second is this test's own, for comparison
    assert found.pop("__all__") is True
    assert min(found.values()) > 100, found  # of equal lists, their lengths; False for others

"""core/common/collector.py: modules leave the collector's sight in a command's own process, and in no other."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from core.cli import main
from core.common.collector import importing

FRESH = """
import gc, sys
from core.cli import main
from core.common.collector import importing
sys.argv = ["core", "--help"]
code = main(ARGUMENTS)
before = gc.get_freeze_count()
with importing():
    assert not gc.isenabled()
    import decimal, fractions, email.message
print(code, gc.isenabled(), gc.get_freeze_count() - before > 5000)
"""


@pytest.mark.cases(1)
@pytest.mark.parametrize(("arguments", "frozen"), [("None", True), ("['--help']", False)])
def test_only_a_process_of_its_own_is_frozen(arguments: str, frozen: bool) -> None:
    command = [sys.executable, "-c", FRESH.replace("ARGUMENTS", arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"0 True {frozen}"


def test_the_collector_goes_on_after_an_import_that_fails() -> None:
    main(["--help"])
    before = gc.get_freeze_count()
    with pytest.raises(ModuleNotFoundError), importing():
        import nothing_of_that_name  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()
    assert gc.get_freeze_count() <= before  # frozen objects may die at any time; none may join them

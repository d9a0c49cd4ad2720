"""The one test function of the suite: pytest_plugin.py makes an item of it for each case."""

from __future__ import annotations

import pytest

from core_conformance.case import CaseInfo
from core_conformance.pytest_plugin import RunCase, refuse


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Say what is missing where the plugin is not loaded."""
    if not metafunc.config.pluginmanager.hasplugin("core_conformance.pytest_plugin"):
        refuse("the plugin that makes the cases is not loaded\n  to do: add -p core_conformance.pytest_plugin")


def test_case(conformance_case: CaseInfo, run_conformance_case: RunCase) -> None:
    """Hold what the case's line says."""
    run_conformance_case(conformance_case)

"""core/cli/output.py: what is printed as JSON is JSON."""

from __future__ import annotations

import json

import pytest

from core.cli.output import print_json


def test_numbers_that_json_has_not_become_null(capsys: pytest.CaptureFixture[str]) -> None:
    inf = float("inf")
    print_json("test/1", ratio=inf, nested={"list": [1.5, float("nan"), -inf], "pair": (2, inf)}, text="NaN", flag=True)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    document = json.loads(capsys.readouterr().out, parse_constant=refuse)
    del document["core"]
    assert document == {
        "schema": "test/1",
        "ratio": None,
        "nested": {"list": [1.5, None, None], "pair": [2, None]},
        "text": "NaN",
        "flag": True,
    }

"""core/compilation/cache/differences.py: what differs is told in a few lines, and what the rest may follow from
first.
"""

from __future__ import annotations

from core.compilation.cache.differences import Difference, Place, brief, differences, explain

OLD = {
    "values": {f"main.layers.{number}.scale": "1" for number in range(700)},
    "options": {"a": "1", "b": "2"},
    "versions": {"python": "3.11.7", "torch": "2.13.0+cpu abc", "triton": "3.6.0", "numpy": "2.4.6"},
    "source": {"core": "aa", "core_acme": "bb"},
}
NEW = {
    "values": {f"main.layers.{number}.scale": "2" for number in range(700)},
    "options": {"a": "1", "b": "3"},
    "versions": {"python": "3.12.1", "torch": "2.13.0 abc", "triton": "3.7.1", "numpy": "2.4.6"},
    "source": {"core": "ab", "core_acme": "bb"},
}
HERE = {"core": Place("/here/core", {"cli/cache.py": "1", "host.py": "1", "same.py": "1"})}
THERE = {"core": Place("/there is/core", {"cli/cache.py": "2", "gone.py": "1", "new.py": "1", "same.py": "1"})}


def test_each_factor_that_differs_is_found_causes_first() -> None:
    old = {"values": {"a": "2", "b": "3", "c": "1"}, "device": {"name": "other"}}
    new = {"values": {"a": "1", "c": "1"}, "device": {"name": "acme"}}
    found = list(map(str, differences(old, new)))
    assert found == ["device: name: other -> acme", "values: a: 2 -> 1", "values: b: 3 -> (none)"]
    assert differences(old, old) == []


def test_another_python_is_told_first_and_what_may_follow_from_it_as_a_count() -> None:
    found = differences(OLD, NEW)
    assert len(found) == 705
    assert explain(found, {}, {}) == [
        "versions: python: 3.11.7 -> 3.12.1, torch: 2.13.0+cpu abc -> 2.13.0 abc, triton: 3.6.0 -> 3.7.1",
        "source: core: aa -> ab",
        "options: b: 2 -> 3",
        "values: main.layers.0.scale: 1 -> 2, main.layers.1.scale: 1 -> 2, and 698 more",
    ]
    assert explain(found, {}, {}, most=2)[2:] == ["and 701 more, of options, values"]
    assert brief(found, {}, {}) == "versions (python, torch, triton), source core, options b, values (700)"


def test_the_source_of_another_checkout_is_named_with_the_files_that_differ() -> None:
    found = differences({"source": {"core": "aa"}}, {"source": {"core": "ab"}})
    files = "4 files differ: cli/cache.py, gone.py, host.py, and 1 more"
    assert explain(found, THERE, HERE) == [f"source: core: that entry is of /there is/core, {files}"]
    assert brief(found, THERE, HERE) == "source core of /there is/core"
    edited = {"core": Place("/here/core", {**HERE["core"].files, "host.py": "2"})}
    assert explain(found, edited, HERE) == ["source: core: 1 file differs: host.py"]
    assert brief(found, edited, HERE) == "source core"


def test_few_lines_however_many_groups_and_factors_differ() -> None:
    found = [Difference(f"group {number}", f"name {each}", "1", "2") for number in range(9) for each in range(100)]
    lines = explain(found, {}, {})
    assert len(lines) == 7 and lines[0] == "group 0: name 0: 1 -> 2, name 1: 1 -> 2, and 98 more"
    assert lines[-1] == "and 300 more, of group 6, group 7, group 8"
    assert brief([], {}, {}) == ""
    assert brief(found[:101], {}, {}) == "group 0 (100), group 1 name 0"

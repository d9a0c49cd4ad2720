"""Entries of the compile cache that were damaged in any way: never an internal error, never a wrong program."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core.cli import main
from core.compilation.cache.store import Store
from tests.compilation.cache.cached_model import Model, X, look, start
from tests.marks import slow_except

Damage = Callable[[random.Random, Path], object]


def flips(rng: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 3)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cuts(rng: random.Random, path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data))])


def moves(rng: random.Random, path: Path) -> None:
    data = path.read_bytes()
    start, length = rng.randrange(len(data)), rng.randint(1, 64)
    path.write_bytes(data[:start] + data[start + length :] + data[start : start + length])


def replaces(rng: random.Random, path: Path) -> None:
    path.write_text(rng.choice(["", "{}", "[]", "null", "1", '"text"', "[" * 100_000, "NaN", "\x00" * 64]))


def takes_another(rng: random.Random, path: Path) -> None:
    others = [each for each in sorted(path.parent.iterdir()) if each.is_file() and each != path]
    shutil.copyfile(rng.choice(others), path)


def is_a_folder(rng: random.Random, path: Path) -> None:
    path.unlink()
    path.mkdir()


def alters(rng: random.Random, path: Path) -> None:
    """Take a piece out of the document, or put something else there."""
    try:
        document = json.loads(path.read_bytes())
    except ValueError:  # damaged before
        return
    holder: Any = document
    while holder:
        key = rng.choice(sorted(holder) if isinstance(holder, dict) else range(len(holder)))
        if isinstance(holder[key], (dict, list)) and holder[key] and rng.random() < 0.8:
            holder = holder[key]
            continue
        if rng.random() < 0.5:
            del holder[key]
        else:
            holder[key] = rng.choice([None, 0, -1, 1e9, "x", [], {}, ["x"], {"x": 1}, "op aten::relu.default"])
        break
    path.write_text(json.dumps(document))


DAMAGES: tuple[Damage, ...] = (
    *(flips, cuts, moves, replaces, takes_another, is_a_folder),
    *(alters, alters, lambda rng, path: path.unlink()),
)


def damage(seed: int, entry: Path) -> str:
    """Damage a file of an entry, or some; now and then with checksums to match. Return how, for the reader."""
    rng, said = random.Random(seed), []
    for _ in range(rng.choice((1, 1, 2))):
        path = rng.choice([each for each in sorted(entry.iterdir()) if each.is_file()])
        each = rng.choice(DAMAGES)
        if path.stat().st_size:
            each(rng, path)
            said.append(f"{getattr(each, '__name__', 'removes')} {path.name}")
    if rng.random() < 0.5:
        files = {each.name: each.read_bytes() for each in entry.iterdir() if each.is_file()}
        sums = {name: hashlib.sha256(data).hexdigest() for name, data in files.items() if name != "checksums.json"}
        if (entry / "checksums.json").is_file():
            (entry / "checksums.json").write_text(json.dumps(sums))
            said.append("sums up")
    return ", ".join(said)


def check(seed: int, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (entry,) = Store(cache).entries()
    said = damage(seed, entry.path)
    assert main(["cache", "list", "--json"]) == 0, said
    (listed,) = json.loads(capsys.readouterr().out)["entries"]
    report = look()
    if report.state == "hit":  # nothing of it was changed but how it is written
        assert not listed["problem"]
        model = Model().eval()
        torch.testing.assert_close(start(model)(x=X)["y"], model(X)["y"])
    else:
        assert report.state == "miss" and report.reason, (said, report)
        assert listed["problem"] or listed["holds"] is None, (said, listed)
        assert Store(cache).entries() == []


@pytest.mark.cases(3)
@pytest.mark.parametrize("seed", range(10))
def test_a_damaged_entry_is_made_anew(seed: int, made_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(seed, made_cache, capsys)


@pytest.mark.cases(3)
@pytest.mark.parametrize("seed", slow_except(range(10), *range(5)))
def test_an_entry_that_is_valid_and_senseless_is_no_internal_error(
    seed: int, made_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody but its user can write one: what it computes is not for the cache to judge."""
    (entry,) = Store(made_cache).entries()
    rng = random.Random(seed)
    alters(rng, entry.path / rng.choice(["reads.json", "graphs.json"]))
    names = ("factors.json", "graphs.json", "reads.json")
    sums = {name: hashlib.sha256((entry.path / name).read_bytes()).hexdigest() for name in names}
    (entry.path / "checksums.json").write_text(json.dumps(sums))
    digest = hashlib.sha256((entry.path / "checksums.json").read_bytes()).hexdigest()
    entry.path.rename(entry.path.with_name(digest[:12] + entry.name[12:]))
    assert main(["cache", "list", "--json"]) == 0 and "Traceback" not in capsys.readouterr().err
    assert look().state in ("hit", "miss")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 220))
def test_any_damaged_entry_is_made_anew(seed: int, made_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(seed, made_cache, capsys)

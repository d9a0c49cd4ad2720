"""Peers: what is missing is said, each runs in a process of its own, and one that is wrong has no figure."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.bench.cells import Cell, Record
from core.bench.checking import check_peers
from core.bench.model import open_model
from core.bench.peers.choosing import choose
from core.bench.peers.folder import model_folder, unreadable
from core.bench.peers.requirements import lacking, versions
from core.bench.peers.subject import ChosenPeer, PeerModel, PeerSubject
from core.bench.rounds import measure
from core.bench.text import check_text
from core.cli import main
from core.common.peers import Peer
from core.device import Device
from core.engine.models.loading import LoadedModel
from core.engine.models.quantizing import Quantize
from core.errors import ModelError, UsageError
from core.quantization.layers import is_quantized
from tests.support import cpu

CELL = Cell(phase="decode", batch=2, tokens=6, steps=3, rounds=2)
THERE = Peer(name="there", runner="tests.bench.fake_peers:honest", requires=("torch>=2",))
ABSENT = Peer(name="absent", runner="nowhere:nothing", requires=("no-such-package-here",), install="pip install it")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return open_model(None, "tiny-llama", cpu(), "auto")[0]


@pytest.fixture(scope="module")
def tokens(loaded: LoadedModel) -> list[list[int]]:
    """The greedy tokens of the cell, by whole forwards."""
    ids = torch.tensor(CELL.prompts(loaded.vocab_size))
    with torch.no_grad():
        for _ in range(2 + CELL.steps * CELL.rounds):
            ids = torch.cat([ids, loaded.model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    found: list[list[int]] = ids[:, CELL.tokens :].tolist()
    return found


def device(*peers: Peer) -> Device:
    return replace(cpu(), parts=replace(cpu().parts, peers=peers))


def test_what_an_environment_lacks_is_named_with_what_it_has() -> None:
    assert lacking(("torch>=2", "packaging")) == []
    (absent, old) = lacking(("no-such-package-here>=1", "torch>=99"))
    assert absent == "no-such-package-here is not installed"
    assert old.startswith("torch is 2.") and old.endswith("not >=99")
    assert versions(("torch>=2", "no-such-package-here")).keys() == {"torch"}


def test_without_names_every_installed_peer_runs_and_the_others_are_said() -> None:
    choice = choose(device(THERE, ABSENT), None, {})
    assert choice.subjects == ("eager", "compile", "reduce-overhead", "max-autotune", "there", "core")
    assert [each.peer for each in choice.peers] == [THERE]
    assert choice.missing == {"absent": "no-such-package-here is not installed; pip install it"}
    assert choose(device(THERE, ABSENT), ("core", "peers"), {}).subjects == ("core", "there")
    assert choose(device(), ("eager", "core"), {}).missing == {}


@pytest.mark.parametrize(
    ("asked", "pythons", "phrases"),
    [
        (("core", "absent"), {}, ("absent: no-such-package-here is not installed", "pip install it")),
        (("core", "thar"), {}, ("thar", "there, absent")),
        ((), {}, ("--subjects", "name at least one")),
        (None, {"thar": "python"}, ("--peer-python thar", "there, absent")),
    ],
)
def test_a_name_that_cant_be_measured_is_refused(
    asked: tuple[str, ...] | None, pythons: dict[str, str], phrases: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as caught:
        choose(device(THERE, ABSENT), asked, pythons)
    assert all(phrase in str(caught.value) for phrase in phrases)


def test_another_python_is_asked_itself(tmp_path: Path) -> None:
    nowhere = choose(device(THERE), None, {"there": str(tmp_path / "python")})
    assert "can't be started" in nowhere.missing["there"] and nowhere.peers == ()
    empty = tmp_path / "empty"
    empty.write_text(f"#!/bin/sh\nexec {sys.executable} -S -I -c 'import core'\n")
    empty.chmod(0o755)
    assert "install core there too" in choose(device(THERE), None, {"there": str(empty)}).missing["there"]


def test_weights_that_are_codes_in_the_folder_have_no_peers() -> None:
    whole = choose(device(THERE), None, {})
    quantised = open_model(None, "tiny-llama", cpu(), "auto", Quantize.of("fp8", None))[0]
    why = unreadable(quantised.model)
    assert "codes" in why and whole.without_peers(why).missing == {"there": why}
    assert "there" not in whole.without_peers(why).subjects and whole.without_peers(why).peers == ()
    with pytest.raises(UsageError, match="leave out there"):
        choose(device(THERE), ("there", "core"), {}).without_peers(why)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("scheme", "weights", "note"),
    [
        ("", "", None),
        ("w8a16", "q8_0", "weights as q8_0"),
        ("w8a16-g32", "q8_0", "weights as q8_0"),
        ("fp8", "", "weights as before quantisation"),
    ],
)
def test_a_peer_quantises_by_its_own_format_or_not_and_says_so(
    loaded: LoadedModel, tokens: list[list[int]], tmp_path: Path, scheme: str, weights: str, note: str | None
) -> None:
    (tmp_path / "tokens.json").write_text(json.dumps(tokens))
    peer = replace(THERE, runner="tests.bench.fake_peers:formatted", formats={"w8a16": "q8_0"})
    model = PeerModel(folder=tmp_path, dtype=torch.float32, vocab_size=loaded.vocab_size, scheme=scheme)
    subject = PeerSubject(ChosenPeer(peer=peer), model)
    (record,), _ = measure([subject], CELL, cpu())
    assert record.notes == [f"format {weights!r}", *([note] if note else [])]


def test_of_a_quantised_model_tokens_are_counted_and_none_is_wrong(tokens: list[list[int]]) -> None:
    quantised = open_model(None, "tiny-llama", cpu(), "auto", Quantize.of("w8a16", None))[0]
    others = [[(token + 1) % quantised.vocab_size for token in row] for row in tokens]
    own, peer = Record(subject="core", tokens=tokens), Record(subject="there", tokens=others)
    check_peers(CELL, [peer], [own], quantised.model, cpu())
    assert not peer.failure and peer.verdict["tokens_agreeing"] == 0 and peer.verdict["tokens_compared"] == 10
    (note,) = peer.notes
    assert note.startswith("tokens differ from core: 0 of 10 equal; sequence 0, token 0: ")
    assert check_text(peer) == "0 of 10 tokens equal (not judged: a peer holds other codes)"


def test_peers_read_the_model_as_it_was_before_it_was_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []

    @contextmanager
    def folder(model: Any) -> Iterator[Path]:
        seen.append(set(model.state_dict()))
        yield Path("nowhere")

    monkeypatch.setattr("core.bench.peers.folder.model_folder", folder)
    monkeypatch.setattr("core.bench.peers.choosing.choose", lambda *_: choose(device(THERE), ("there",), {}))
    monkeypatch.setattr("core.bench.bench.bench", lambda loaded, *_, **more: _stopped(loaded, more["peers"]))
    small = ["--batch", "1", "--context", "8", "--rounds", "1", "--steps", "1", "--prefill", ""]
    assert main(["bench", "--preset", "tiny-llama", "--device", "cpu", "--quantize", "w8a16", *small]) == 2
    (names,) = seen
    assert "model.layers.0.self_attn.q_proj.weight" in names and not any("scale" in name for name in names)


def _stopped(loaded: LoadedModel, peers: Mapping[str, Any]) -> Any:
    assert is_quantized(loaded.model) and set(peers) == {"there"}
    raise UsageError("a bench", found="nothing is measured here", remedy="nothing")


def test_the_folder_states_the_rotary_base_as_older_versions_read_it(loaded: LoadedModel) -> None:
    assert unreadable(loaded.model) == ""
    with model_folder(loaded.model) as folder:
        config = json.loads((folder / "config.json").read_text())
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500_000.0
        assert list(folder.glob("*.safetensors"))
    assert not folder.exists()


def subject(runner: str, folder: Path, **more: Any) -> PeerSubject:
    peer = Peer(name=runner, runner=f"tests.bench.fake_peers:{runner}", requires=("packaging",), **more)
    return PeerSubject(ChosenPeer(peer=peer), PeerModel(folder=folder, dtype=torch.float32, vocab_size=160))


@pytest.mark.slow
def test_peers_run_in_turns_and_a_wrong_one_has_no_figure(
    loaded: LoadedModel, tokens: list[list[int]], tmp_path: Path
) -> None:
    (tmp_path / "tokens.json").write_text(json.dumps(tokens))
    names = ("honest", "wrong", "refusing", "dying")
    records, order = measure([subject(name, tmp_path) for name in names], CELL, cpu())
    honest, wrong, refusing, dying = records
    assert order == [("honest", "wrong"), ("wrong", "honest")]
    assert honest.tokens == tokens and len(honest.rounds_ms) == 2 and all(ms > 0 for ms in honest.rounds_ms)
    assert honest.details["versions"].keys() >= {"torch", "packaging"}
    assert honest.notes == [f"{torch.get_num_threads()} threads"]
    assert "ValueError: no float32 here" in refusing.failure and "exit code 3" in dying.failure
    own = [Record(subject="eager", tokens=tokens), Record(subject="core", tokens=tokens)]
    check_peers(CELL, records, own, loaded.model, cpu())
    assert honest.failure == "" and honest.verdict["tokens_equal"] and honest.verdict["against"] == "core"
    assert wrong.failure.startswith("computes something else: sequence 0, token 2:")
    assert wrong.verdict["differences"] == "wrong" and wrong.verdict["tokens_agreeing"] == 4
    assert wrong.verdict["tokens_compared"] == 2 * (2 + CELL.steps)


def test_a_near_tie_is_no_mistake(
    loaded: LoadedModel, tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from core.bench import checking

    def tied(model: Any, contexts: Any, *rest: Any) -> Any:
        """Return the model's logits with those of both tokens as close as eager's rounding error."""
        found, how = exact(model, contexts, *rest)
        for logits in found:
            best = int(logits.argmax())
            logits[(best + 1) % len(logits)] = logits[best] - 1e-9
        return found, how

    exact = checking.reference_logits
    other = [[*row[:2], *((token + 1) % 160 for token in row[2:])] for row in tokens]
    record, own = Record(subject="peer", tokens=other), Record(subject="core", tokens=tokens)
    monkeypatch.setattr(checking, "reference_logits", tied)
    check_peers(CELL, [record], [own], loaded.model, cpu())
    assert record.failure == "" and record.verdict["differences"].startswith("near-ties by fp64")
    assert record.verdict["tokens_equal"] is False and "tokens differ from core" in record.notes[0]


def test_a_dtype_that_a_peer_lacks_is_refused(tmp_path: Path) -> None:
    peer = subject("honest", tmp_path, dtypes=("bfloat16",))
    with pytest.raises(ModelError, match="it computes in bfloat16"):
        peer.open(CELL, Record(subject="honest"))
    peer.close()


def test_a_peer_that_names_a_token_beyond_the_vocabulary_is_wrong(loaded: LoadedModel, tokens: list[list[int]]) -> None:
    record = Record(subject="peer", tokens=[[160, *row[1:]] for row in tokens])
    check_peers(CELL, [record], [Record(subject="core", tokens=tokens)], loaded.model, cpu())
    assert "which the vocabulary does not have" in record.failure

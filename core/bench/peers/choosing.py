"""Chooses the subjects of a bench: those of `core` itself, and the device's peers that are installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from core.bench.bench import SUBJECTS
from core.bench.peers.requirements import lacking
from core.bench.peers.subject import WORKER, ChosenPeer
from core.common.peers import Peer
from core.errors import UsageError
from core.host.workers.worker import PersistentWorker

if TYPE_CHECKING:
    from core.device import Device

_CHECK_S = 120.0
_ALL = "peers"
"""In a list of subjects: all peers that are installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What is measured, and what is not."""

    #: Names, in the order of the report.
    subjects: tuple[str, ...]
    peers: tuple[ChosenPeer, ...]
    #: The peers that can't be measured here: name -> what is missing and how to get it.
    missing: Mapping[str, str]
    #: Whether the user named one of the peers.
    named: bool

    def without_peers(self, why: str) -> Choice:
        """Return the choice where no peer can run the model; raise `UsageError` if the user named one."""
        names = [chosen.peer.name for chosen in self.peers]
        if names and self.named:
            raise UsageError(f"--subjects {','.join(self.subjects)}", found=why, remedy=f"leave out {', '.join(names)}")
        subjects = tuple(name for name in self.subjects if name not in names)
        return replace(self, subjects=subjects, peers=(), missing={**self.missing, **dict.fromkeys(names, why)})


def choose(device: Device, asked: Sequence[str] | None, pythons: Mapping[str, str]) -> Choice:
    """Return what is measured: of `asked`, where `peers` stands for all that are installed, or for None everything.

    pythons: by the name of a peer the Python that runs it, for one whose packages are in another environment. Raises
    `UsageError` for an unknown name, and for a peer asked for by name that lacks something.
    """
    known = {peer.name: peer for peer in device.parts.peers}
    named = () if asked is None else tuple(name for name in asked if name != _ALL)
    listed = (*SUBJECTS[:-1], _ALL, SUBJECTS[-1]) if asked is None else asked
    names = tuple(dict.fromkeys(one for name in listed for one in (known if name == _ALL else (name,))))
    _check_names("--subjects", names, (*SUBJECTS, *known, _ALL))
    _check_names("--peer-python", tuple(pythons), tuple(known))
    wanted = [ChosenPeer(peer=known[name], python=pythons.get(name, "")) for name in names if name in known]
    missing = {chosen.peer.name: text for chosen in wanted if (text := _missing(chosen))}
    if absent := [name for name in missing if name in named]:
        name, text = absent[0], missing[absent[0]]
        found, _, remedy = text.partition("; ")
        raise UsageError(f"--subjects {','.join(names)}", found=f"{name}: {found}", remedy=remedy)
    peers = tuple(chosen for chosen in wanted if chosen.peer.name not in missing)
    subjects = tuple(name for name in names if name not in missing)
    return Choice(
        subjects=subjects, peers=peers, missing=missing, named=any(chosen.peer.name in named for chosen in peers)
    )


def _check_names(option: str, names: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown or (option == "--subjects" and not names):
        raise UsageError(
            f"{option} {','.join(names)}",
            found=f"the names are {', '.join(known)}" if known else "the device has no peers",
            remedy=f"leave out {', '.join(unknown)}" if unknown else "name at least one of these",
        )


def _missing(chosen: ChosenPeer) -> str:
    peer: Peer = chosen.peer
    lacks, where = lacking(peer.requires), ""
    if chosen.python:
        where = f" in the environment of {chosen.python}"
        try:
            with PersistentWorker(WORKER, python=chosen.python) as worker:
                result = worker.request({"op": "lacks", "requires": peer.requires}, timeout_s=_CHECK_S)
        except OSError as error:
            return (
                f"{chosen.python} can't be started: {error.strerror}; name a Python by --peer-python {peer.name}=PATH"
            )
        if result.answer is None:
            said = " ".join(result.output.split())[-200:]
            return f"{chosen.python} {result.problem} ({said}); install core there too: pip install --no-deps core"
        lacks = list(result.answer["lacks"])
    return f"{', '.join(lacks)}{where}; {peer.install or 'install it'}" if lacks else ""

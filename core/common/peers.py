"""Peers, as data: other ways to run the same model, which `core bench` measures in turns with `core`.

A device declares its peers by `DeviceParts.peers`. Each runs in a process of its own: what it sets for the whole
process stays there, a crash too, and it may have a Python and a torch of its own. So this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """One way to run a model that is not `core`'s."""

    #: As `core bench --subjects` names it.
    name: str
    #: What the process of the peer imports, `module:callable`: a `MakeRunner`.
    runner: str
    #: What must be installed beside it, as requirements of PEP 508 without extras.
    requires: tuple[str, ...] = ()
    #: How to get what is missing: the end of an error message.
    install: str = ""
    #: The dtypes that it computes in, by torch's names; empty for all.
    dtypes: tuple[str, ...] = ()
    #: Its own format for models that `core` quantises by a scheme: scheme, without a group size -> format. By other
    #: schemes it computes with the weights as they were before.
    formats: Mapping[str, str] = field(default_factory=dict)
    #: Whether it can draw random weights itself: of a model whose weights are random anyway its folder then holds the
    #: configuration alone, and its tokens are not compared.
    draws_weights: bool = False
    #: Whether one process serves all cells of a phase: for a peer that takes minutes to start.
    lasting: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerWork:
    """What a peer is asked to compute: one cell of a bench."""

    #: The model as transformers saves it: `config.json` and safetensors, these not for a peer that draws weights. Peers
    #: may add files that they convert it to.
    folder: Path
    #: torch's name of the dtype of the weights.
    dtype: str
    #: Threads that may compute.
    threads: int
    phase: Literal["decode", "prefill"]
    #: The tokens of each sequence, all equally many; one sequence for prefill.
    prompts: list[list[int]]
    #: The most tokens that a sequence will hold.
    limit: int
    #: The peer's own format into which it is to quantise the weights of layers; "" for the weights as they are.
    weights: str = ""
    #: What the process will be asked for while it lasts: sequences, and the most tokens that each will hold.
    sizes: Sequence[tuple[int, int]] = ()


@dataclass(kw_only=True, slots=True)
class PeerRunner:
    """A peer that is warm: everything compiled, prompts computed, and in decode one step taken."""

    #: The tokens of each sequence so far, chosen greedily: of prefill one, of decode two.
    tokens: list[list[int]]
    #: Takes a number of steps (of prefill: computes the prompt so often) and returns each sequence's new tokens. The
    #: host has the tokens of a step before the next step begins. This call is timed.
    run: Callable[[int], list[list[int]]]
    #: Called before each timed `run`, outside of the measured time.
    ready: Callable[[], None] = lambda: None
    #: Returns the seconds that the steps of the last `run` took, of a peer whose `run` has to do more than these.
    elapsed: Callable[[], float] | None = None
    #: What a reader of the figures should know.
    notes: list[str] = field(default_factory=list)
    #: Ends the cell in a process that lasts: what follows it is the next cell.
    end: Callable[[], None] = lambda: None
    #: Kept alive as long as the runner.
    keeps: Any = None


class MakeRunner(Protocol):
    """What `Peer.runner` names; raises where the model can't be run, with the reason."""

    def __call__(self, work: PeerWork) -> PeerRunner: ...

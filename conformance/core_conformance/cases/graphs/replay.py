"""Promises about the result of a replay: the values of the uncaptured callable on the content of the captured
addresses."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from core.common.graphs.backend import GraphKey
from core.device import Device, Mode
from core_conformance.cases.graphs.drive import (
    TOKENS,
    WIDTH,
    Tensors,
    Wanted,
    capture,
    check_apart,
    check_replay,
    check_same,
    normal,
    record,
    session,
    whole,
)
from core_conformance.cases.graphs.models import NUM_PRODUCTS, block, crowded, slow, weighted
from core_conformance.cases.graphs.promises import GRAPHS, IN_PARTS, WITHOUT_PYTHON, Promise
from core_conformance.dtypes import DTYPES
from core_conformance.trial import Trial

ROUNDS = 4


def replays(trial: Trial, mode: Mode, dtype: torch.dtype) -> None:
    """Replay a layer on changed inputs, and twice on the same ones."""
    subject = block(trial.device, dtype, trial.seed)
    x = subject.tensors["x"]
    # The last input repeats the first one: state that a graph keeps between runs would show.
    values = [normal((TOKENS, WIDTH), trial.seed + 1 + number % ROUNDS, x) for number in range(ROUNDS + 1)]
    wanted = []
    for value in values:
        subject.write(x=value)
        wanted.append(Wanted(trial, subject))
    subject.write(x=torch.zeros_like(x))  # no replay has the content that the capture saw
    captured = capture(trial.device, mode, subject)
    kept: list[Tensors] = []
    for number, (value, each) in enumerate(zip(values, wanted, strict=True)):
        subject.write(x=value)
        outputs = captured.replay()
        each.check(f"replay {number}", outputs)
        kept.append(tuple(output.clone() for output in outputs))
        subject.write(x=value)
        _repeats(trial, f"the same inputs twice, {number}", captured.replay(), kept[-1], bitwise=each)
    _repeats(trial, "the first inputs once more", kept[-1], kept[0], bitwise=wanted[0])


def _repeats(trial: Trial, name: str, outputs: Tensors, before: Tensors, *, bitwise: Wanted) -> None:
    """Require the bits of an earlier replay on equal inputs, unless the plugin declares that they may differ."""
    if bitwise.is_exact:
        check_same(trial, name, outputs, before)


def outputs(trial: Trial, mode: Mode) -> None:
    """Hold all outputs of a replay while memory is taken and given back around them."""
    subject = crowded(trial.device)
    captured = capture(trial.device, mode, subject)
    places: list[list[int]] = []
    for number in range(ROUNDS):
        subject.write(x=whole((TOKENS, WIDTH), 10 + number, subject.tensors["x"]))
        wanted = Wanted(trial, subject)
        held = captured.replay()
        _reuse_memory(trial.device, held)
        wanted.check(f"replay {number}", held)
        wanted.check_form(f"replay {number}", held)
        check_apart(trial, held, subject.tensors)
        places.append([output.data_ptr() for output in held])
    if mode in GRAPHS:
        trial.require(all(place == places[0] for place in places), f"outputs move from replay to replay: {places}")


def _reuse_memory(device: Device, like: Tensors) -> None:
    """Allocate memory of the same sizes, fill it, and free it: outputs whose memory is not held would be
    overwritten."""
    gc.collect()
    taken = [torch.empty_like(tensor).fill_(1) for tensor in like for _ in range(3)]
    taken += [torch.empty_like(tensor).view(-1).fill_(1) for tensor in taken]
    del taken
    device.parts.empty_cache()


def read_at_once(trial: Trial, mode: Mode) -> None:
    """Read results with no synchronize between, in every way that a caller would."""
    device = trial.device
    subject = slow(device)
    captured = capture(device, mode, subject)
    # Column j of x @ P is the column i of x for which P[i, j] is 1.
    inverse = torch.argsort(subject.tensors["shuffle"].cpu().float().argmax(1))
    width = len(inverse)
    scope: Any = nullcontext
    for number in range(2 * ROUNDS):
        if number == ROUNDS:  # and again on another stream
            scope = device.parts.side_stream
        device.synchronize()
        with scope():
            x = whole((width, width), number, subject.tensors["x"])
            want = x.cpu()
            for _ in range(NUM_PRODUCTS):
                want = want[:, inverse]
            # Work queued before the replay, which has to come first.
            subject.tensors["x"].copy_(((x + 1) @ subject.tensors["shuffle"] - 1) @ subject.tensors["shuffle"].t())
            result, row = captured.replay()
            how = number % ROUNDS
            if how == 0:
                trial.same(f"round {number}: read by .cpu()", result.cpu(), want)
            elif how == 1:
                trial.require(torch.equal(result, want.to(result.device)), f"round {number}: torch.equal differs")
            elif how == 2:
                trial.same(f"round {number}: a computation on it", (result * 2 - result).cpu(), want)
            else:
                trial.same(f"round {number}: the last output", row.tolist(), (want[0] + 1).tolist())
    device.synchronize()


def python_runs_once(trial: Trial, mode: Mode) -> None:
    """Count the runs of each part of the captured Python."""
    counts = {"first": 0, "between": 0, "second": 0}
    plain = weighted(trial.device)

    def counted(name: str) -> Any:
        def run(*args: Any) -> Any:
            counts[name] += 1
            return getattr(plain, name)(*args)

        return run

    subject = replace(plain, first=counted("first"), between=counted("between"), second=counted("second"))
    captured = capture(trial.device, mode, subject)
    before = dict(counts)
    for number in range(ROUNDS):
        plain.write(x=whole((TOKENS, WIDTH), number, plain.tensors["x"]))
        Wanted(trial, plain).check(f"replay {number}", captured.replay())
    runs = {name: count - before[name] for name, count in counts.items()}
    eager = ROUNDS if captured.in_parts else 0
    want = {"first": 0, "between": eager, "second": 0}
    trial.require(runs == want, f"{ROUNDS} replays ran the captured Python {runs} times, not {want}")


def addresses(trial: Trial, mode: Mode) -> None:
    """Change inputs and weights in place between capture and replay."""
    subject = weighted(trial.device)
    captured = capture(trial.device, mode, subject)
    for number in range(ROUNDS):
        subject.write(weight=whole((WIDTH,), 20 + number, subject.tensors["x"]))
        if number % 2:
            subject.write(x=whole((TOKENS, WIDTH), 30 + number, subject.tensors["x"]))
        what = "weights and inputs" if number % 2 else "weights"
        Wanted(trial, subject).check(f"{what} changed in place, {number}", captured.replay())


def constants(trial: Trial, mode: Mode) -> None:
    """Change what Python read at capture; the graph keeps what it had then."""
    plain, constant = weighted(trial.device), [3.0]
    subject = replace(plain, second=lambda tensors, product: (product + constant[0],))
    captured = capture(trial.device, mode, subject)
    wanted = Wanted(trial, subject)
    constant[0] = 5.0
    wanted.check("a host's number changed after the capture", captured.replay())


def keys(trial: Trial, mode: Mode) -> None:
    """Replay several keys whose outputs have the same metadata."""
    device, backend = trial.device, trial.device.graph_backend()
    found = [
        GraphKey("decode", (8,)),
        GraphKey("decode", (4,)),
        GraphKey("prefill", (8,)),
        GraphKey("decode", (8,), (("lora", True),)),
        GraphKey("decode", (8,), (("lora", False),)),
        GraphKey("decode", (4, 2)),
    ]
    with session(backend):
        captured = {key: record(mode, backend, weighted(device, float(n)), key) for n, key in enumerate(found)}
    device.synchronize()
    for number, key in enumerate([*found, *reversed(found), *found[::2], *found]):
        check_replay(trial, captured[key], number, f"{key}, call {number}")


def segments(trial: Trial, mode: Mode) -> None:
    """Run eagerly between two graphs: in order, on values of this replay, which the second graph then reads."""
    seen: list[float] = []
    plain = weighted(trial.device)

    def between(product: Tensor) -> Tensors:
        seen.append(float(product.sum()))
        return (product * len(seen),)  # scale by a number of the host, which no graph could update

    subject = replace(plain, between=between)
    captured = capture(trial.device, mode, subject)
    for number in range(ROUNDS):
        subject.write(x=whole((TOKENS, WIDTH), 40 + number, subject.tensors["x"]))
        product = subject.tensors["x"] * subject.tensors["weight"]
        (result, *_) = captured.replay()
        trial.same(f"what the eager call of replay {number} saw", seen[-1], float(product.sum()))
        trial.same(f"what the graph after it read in replay {number}", result, product * len(seen) + 3.0)
    trial.require(all(captured.empty), "the replay of a segment returns something else than ()")


PROMISES = (
    Promise(
        name="replay",
        what="replays equal the uncaptured callable in every bit, on changed inputs and twice on the same",
        run=replays,
        dtypes=DTYPES,
    ),
    Promise(name="outputs", what="outputs share no memory, stay while they are held, and do not move", run=outputs),
    Promise(name="read-at-once", what="results are there when they are read without synchronize", run=read_at_once),
    Promise(
        name="python-once",
        what="a replay does not run the captured Python again",
        run=python_runs_once,
        scope=WITHOUT_PYTHON,
    ),
    Promise(name="addresses", what="inputs and weights changed in place are seen", run=addresses),
    Promise(
        name="constants",
        what="a number of the host stays what it was at capture",
        run=constants,
        scope=WITHOUT_PYTHON,
    ),
    Promise(name="keys", what="each key replays its own graph", run=keys),
    Promise(
        name="segments",
        what="eager calls between graphs see values of this replay, and their results are read",
        run=segments,
        scope=IN_PARTS,
    ),
)

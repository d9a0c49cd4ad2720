"""The promise of programs whose captured ops take arguments from the host: each replay is given new ones."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from core.common.conformance import HostArgumentExample
from core.compilation.capture.inputs import InputSpec
from core.compilation.program import Program
from core.device import Mode
from core.errors import UsageError
from core_conformance.cases.calls.programs import doubled, make
from core_conformance.cases.graphs.promises import Promise
from core_conformance.trial import Trial, raised

_TWO_STEPS = "host_argument_example gives fewer than two steps, or steps with equal results: they prove nothing"


def host_arguments(trial: Trial, mode: Mode) -> None:
    """Renew the host-side arguments of the plugin's own example at each replay."""
    device, make_example = trial.device, trial.profile.host_argument_example
    if make_example is None:
        trial.fail("the device declares update=True, and its profile has no host_argument_example to try")
        return
    example = make_example(device.torch_device)
    if example.steps and example.steps[0].keys() <= example.inputs.keys():
        _values_of_inputs(trial, mode, example)
        return
    inputs: dict[str, Any] = dict(example.inputs)
    name = next(iter(inputs))

    def function(step: Mapping[str, Any], **given: Tensor) -> Tensor:
        return example.function(**{**given, name: doubled(given[name])}, **step)

    specs = {each: InputSpec(tuple(tensor.shape), tensor.dtype) for each, tensor in inputs.items()}
    steps = [*example.steps, *reversed(example.steps)]
    wanted = [function(step, **inputs) for step in example.steps]
    trial.require(len(wanted) > 1 and not any(torch.equal(a, b) for a, b in pairwise(wanted)), _TWO_STEPS)
    with make(device, mode, partial(function, example.steps[0]), specs) as program:
        (key,) = program.keys
        for number, step in enumerate(steps):
            given: dict[str, Any] = {each: tensor.flip(0) if number % 2 else tensor for each, tensor in inputs.items()}
            want = function(step, **given)
            trial.same(f"step {number}, called", program(step=step, **given), want)
            trial.same(f"step {number}, replayed", program.replay(key, step=step), want)
        for wrong in (None, {}, {**steps[0], "no_such_argument": 1}):
            _refuses(trial, program, wrong)
        trial.same("after refusals", program(step=steps[0], **inputs), wanted[0])


def _refuses(trial: Trial, program: Program, step: Mapping[str, Any] | None) -> None:
    error = raised(UsageError, program.replay, program.keys[0], step=step)
    trial.require(error is not None, f"a replay with host-side arguments {step} is not refused")


def _values_of_inputs(trial: Trial, mode: Mode, example: HostArgumentExample) -> None:
    """Renew host-side arguments that are values of inputs: from a step, and from the inputs where these are given."""
    device, names = trial.device, tuple(example.steps[0])
    inputs: dict[str, Any] = dict(example.inputs)
    first = next(name for name in inputs if name not in names)

    def function(**given: Tensor) -> Tensor:
        return example.function(**{**given, first: doubled(given[first])})

    def filled(step: Mapping[str, Any]) -> dict[str, Tensor]:
        return {name: torch.tensor(step[name]).to(inputs[name].dtype).view_as(inputs[name]) for name in names}

    specs = {name: InputSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in inputs.items()}
    on_host = [filled(step) for step in example.steps]
    given = [{**inputs, **{n: t.to(device.torch_device) for n, t in values.items()}} for values in on_host]
    wanted = [function(**each) for each in given]
    trial.require(len(wanted) > 1 and not any(torch.equal(a, b) for a, b in pairwise(wanted)), _TWO_STEPS)
    with make(device, mode, function, specs) as program:
        (key,) = program.keys
        found = program.host_arguments(key)
        trial.same("the names of the host-side arguments", sorted(found), sorted(names))
        rounds = list(zip(example.steps, given, on_host, wanted, strict=True))
        for number, (step, on_device, values, want) in enumerate([*rounds, *reversed(rounds)]):
            trial.same(f"step {number}, called", program(step=step, **on_device), want)
            trial.same(f"step {number}, replayed", program.replay(key, step=step), want)
            trial.same(f"step {number}, with its values on the host", program(**{**inputs, **values}), want)
            staging = program.staging()
            for name, tensor in staging.inputs(key).items():
                tensor.copy_(on_device[name])
            trial.same(f"step {number}, staged", staging.replay(key), want)
        for name in names:
            short = {**example.steps[0], name: list(example.steps[0][name])[1:]}
            for wrong in (None, {}, short, {**example.steps[0], "no_such_argument": [1]}):
                _refuses(trial, program, wrong)
        trial.same("after refusals", program(step=example.steps[0], **given[0]), wanted[0])


UPDATES = Promise(name="host-arguments", what="host-side arguments are renewed at each replay", run=host_arguments)

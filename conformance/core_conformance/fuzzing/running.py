"""Runs one case on examples that hypothesis draws, and reports the smallest one that fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from core.common.ops.quantize.symmetric import RANGES
from core.host.distributions.installing import pip_install
from core.verify.execution import error_line
from core_conformance.dtypes import dtype_name
from core_conformance.outcome import Measurement
from core_conformance.rules.tolerances import FUZZ_CODES_FACTOR, FUZZ_SMALL, FUZZ_SMALL_FACTOR
from core_conformance.trial import NotSupported, Skip, Trial

if TYPE_CHECKING:
    from hypothesis.strategies import DataObject

PHASES = ("generate", "shrink")
"""The phases of hypothesis, without `explain`, which would double the time."""

Example = Callable[["DataObject", Trial], None]
"""Draws one example, notes a description of it, and judges it; all through a trial of its own."""


_CODES = set(map(dtype_name, RANGES))


class _Falsified(AssertionError):
    """An example that fails: tells hypothesis to look for a smaller one."""


class _Examples:
    """The state of one case's examples. count: how many were tried, including those that led to the smallest."""

    def __init__(self, trial: Trial, example: Example) -> None:
        self.count = 0
        self.worst: Measurement | None = None
        self.failed = ""
        self._trial, self._example = trial, example

    def try_one(self, data: DataObject) -> None:
        """Draw and judge one example; raise `_Falsified` where it fails."""
        from hypothesis.errors import HypothesisException

        own = self._trial.fork()
        try:
            self._example(data, own)
            reason = next(iter(_reasons(own)), "")
        except (NotSupported, Skip, HypothesisException):
            raise
        except Exception as error:
            reason = f"raises {error_line(error)}"
        self.count += 1
        if reason:
            self.failed = f"{own.notes[0] if own.notes else 'drawing an example'}: {reason}"
            raise _Falsified(reason)
        self.worst = max((self.worst, *own.measurements), key=lambda each: -1.0 if each is None else each.ratio)


def run_examples(trial: Trial, example: Example) -> int:
    """Run `trial.fuzz` examples, the same for the same seed; report the worst, or the smallest that fails.

    Returns how many ran: fewer where examples are passed over so often that no more were found, 0 where all were.
    Raises `Skip` where hypothesis is not installed.
    """
    try:
        from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
        from hypothesis.errors import Flaky, Unsatisfiable
        from hypothesis.strategies import data
    except ImportError:
        raise Skip(f"hypothesis is not installed; {pip_install('conformance')}") from None
    examples = _Examples(trial, example)
    chosen = settings(
        max_examples=trial.fuzz,
        phases=[Phase[name] for name in PHASES],
        database=None,
        deadline=None,
        print_blob=False,
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )

    def run(data: DataObject) -> None:
        examples.try_one(data)

    try:
        seed(trial.seed)(chosen(given(data())(run)))()
    except _Falsified:
        trial.fail(examples.failed)
    except Unsatisfiable:
        pass
    except Flaky:
        trial.fail(f"{examples.failed} (not each time: the same example also passed)")
    if examples.worst is not None:
        name = f"worst of {examples.count} examples: {examples.worst.name}"
        # A small value may exceed ratio 1 without being a failure.
        trial.record(name, examples.worst.criterion, min(examples.worst.ratio, 1.0))
    trial.note(f"{examples.count} examples")
    return examples.count


def pass_over() -> NoReturn:
    """End an example that does not apply; another one is drawn in its place."""
    from hypothesis import reject

    reject()


def _reasons(trial: Trial) -> list[str]:
    """Return why an example fails, without reasons whose bounds are too strict for thousands of examples."""
    forgiven = {f"{each.name}: {each.reason}" for each in trial.measurements if each.ratio <= _limit(each)}
    return [reason for reason in trial.failures if reason not in forgiven]


def _limit(measured: Measurement) -> float:
    """Return the ratio above which a value fails here: more than 1 for small ones, and for shares of codes."""
    if measured.criterion == "T0":
        return FUZZ_CODES_FACTOR if measured.dtype in _CODES else 1.0
    return FUZZ_SMALL_FACTOR if measured.num_elements < FUZZ_SMALL else 1.0


def described(arguments: Mapping[str, Any]) -> str:
    """Return a call's arguments in one line, tensors by dtype, shape and where they lie if not one after the other."""
    return ", ".join(f"{name}={_text(value)}" for name, value in arguments.items())


def _text(value: Any) -> str:
    if not isinstance(value, Tensor):
        return str(value).removeprefix("torch.")
    strides = "" if value.is_contiguous() else f" strides {value.stride()}"
    offset = f" offset {value.storage_offset()}" if value.storage_offset() else ""
    return f"{dtype_name(value.dtype)}{tuple(value.shape)}{strides}{offset}"

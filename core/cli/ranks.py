"""`--tp`: a command on several ranks. This process starts them and reports; in each of them the command runs again."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from core.engine.parallel.rank import (
    check_no_index,
    end_with_launcher,
    finish,
    is_launched,
    leave,
    num_ranks,
    own_rank,
    report,
)
from core.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from core.engine.models.loading import LoadedModel
    from core.engine.models.sharding import ExpertCut
    from core.engine.parallel.rank import Rank

TP: Any = typer.Option(
    None, "--tp", min=1, help="Processes that share the model, each with a part of it (docs/tensor_parallel.md)."
)
TP_TIMEOUT: Any = typer.Option(
    300.0, "--tp-timeout", min=1, help="With several processes: seconds that each waits for the others."
)
EXPERTS: Any = typer.Option(
    "width", help="With several processes: each holds some columns of all experts (width), or some of them (number)."
)
"""Defaults of a subcommand's parameters `tp`, `tp_timeout` and `experts`."""

COMMAND_LINE: ContextVar[tuple[str, ...]] = ContextVar("COMMAND_LINE", default=())
"""The arguments of the command that runs, without the program's name."""


def check_experts(text: str) -> ExpertCut:
    """Return what `--experts` asks for; raise `UsageError` for anything else."""
    from core.engine.models.resolve import check_choice

    check_choice("--experts", text, ("width", "number"))
    return "number" if text == "number" else "width"


def check_ranks(
    tp: int | None, *, device: str = "auto", draft_model: Path | str | None = None, lora: object = None
) -> int:
    """Return how many ranks the command takes; raise `UsageError`, without torch, for what several can't do."""
    size = num_ranks()
    if size > 1 and tp not in (None, size):
        found = f"a launcher has started this process as one of {size} ranks"
        raise UsageError(f"--tp {tp}", found=found, remedy=f"leave --tp out, or start {tp} ranks")
    wanted = max(size, tp or 1)
    check_no_index(device, wanted)
    if wanted > 1 and draft_model is not None:
        found = "a draft model can't be shared by several ranks yet"
        raise UsageError(f"--draft-model with {wanted} ranks", found=found, remedy="leave --draft-model out")
    if wanted > 1 and lora:
        found = "the layers are cut among the ranks, and adapters are not"
        raise UsageError(f"--lora with {wanted} ranks", found=found, remedy="leave --lora or --tp out")
    return wanted


def run_on_ranks(tp: int | None, timeout_s: float, *, drain_timeout_s: float | None = None, **asked: Any) -> int | None:
    """Run the command on `tp` ranks of this machine and return its exit code; None where this process shall run it.

    asked: as of `check_ranks`, whose errors it raises. Raises the `CoreError` that names the rank that failed.
    """
    wanted = check_ranks(tp, **asked)
    if num_ranks() > 1 or wanted == 1:
        return None
    from core.engine.parallel.launch import run_ranks

    arguments = COMMAND_LINE.get()
    command = f"core {next((each for each in arguments if not each.startswith('-')), '')}".strip()
    return run_ranks(arguments, wanted, asked=command, timeout_s=timeout_s, drain_timeout_s=drain_timeout_s)


def begin() -> None:
    """Begin a command that a launcher may have started: it ends with its launcher, and rank 0 alone prints."""
    if is_launched():
        end_with_launcher()
    if own_rank():
        sys.stdout = open("/dev/null", "w", encoding="utf-8")  # noqa: SIM115  (as long as the process)


def end(code: int) -> int:
    """Tell the launcher that the command is done, leave the job's groups, and return the exit code."""
    if is_launched():
        finish(code)
    leave()
    return code


def told(error: Exception, *, debug: bool) -> bool:
    """Tell the launcher an error, and return whether there is one: it prints, and knows what the other ranks say."""
    if is_launched():
        report(error)
        if debug:
            traceback.print_exception(error)
    return is_launched()


def tried(loaded: LoadedModel, rank: Rank, experts: ExpertCut = "width") -> LoadedModel:
    """Try the way in which a model was cut on a tiny one of its type; return it, with a warning where that can't be.

    Raises `UsageError` where such a model is not the same in parts.
    """
    if rank.size == 1:
        return loaded
    from core.engine.parallel.trial import try_plan

    untried = try_plan(loaded.config.model_type, next(loaded.model.parameters()).device, experts)
    return replace(loaded, warnings=(*loaded.warnings, untried)) if untried else loaded


def why_not_whole(loaded: LoadedModel, rank: Rank, oracle: bool | None) -> str:
    """Return why rank 0 does not load the whole model to compare with it, "" where it does or is alone."""
    from core.engine.check.comparison import MAX_ORACLE_PARAMETERS

    if rank.size == 1 or oracle or loaded.num_parameters <= MAX_ORACLE_PARAMETERS:
        return ""
    size = f"{loaded.num_parameters / 1e9:.1f} billion parameters"
    return f"rank 0 would have to hold the whole model, of {size}; --oracle does so"


def whole_of(load: Callable[..., LoadedModel], rank: Rank, experts: ExpertCut) -> LoadedModel | None:
    """Load the whole model beside this rank's part; None where there is one rank. load: called with `rank`.

    Where inputs are quantised as they come, it quantises them in parts, as the ranks do.
    """
    from core.engine.models.sharding import quantize_in_parts
    from core.engine.parallel.rank import Rank

    if rank.size == 1:
        return None
    loaded = load(rank=Rank())
    quantize_in_parts(loaded.model, rank.size, experts)
    return loaded

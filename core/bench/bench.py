"""Runs a bench: measures every cell with all subjects on the same weights, checks it, and adds its floor."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from core.bench.cells import BenchReport, Cell, CellReport, Record
from core.bench.checking import check, check_peers
from core.bench.engines import Engines
from core.bench.floor import Shape, decode_floor, prefill_floor, shape_of
from core.bench.model import engine_options
from core.bench.rates import Rates, measure_rates
from core.bench.rounds import Subject, measure
from core.bench.served import CoreSubject
from core.bench.static import COMPILE_MODES, SharedCache, StaticSubject, sharing_copy
from core.compilation.options import Progress
from core.engine.inspect.cache_codes import CACHE_DTYPES
from core.engine.steps.runner import EngineConfig
from core.errors import UsageError

if TYPE_CHECKING:
    from core.device import Device
    from core.engine.models.loading import LoadedModel

SUBJECTS = ("eager", *COMPILE_MODES, "core")
_PREFILLS = 8  # a round runs one prompt per this many decode steps
_SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("intermediate_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok"),
)
_PACKAGES = ("torch", "transformers", "numpy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What is measured."""

    subjects: tuple[str, ...] = SUBJECTS
    #: Those of the subjects that are peers, which run in a process each.
    peers: tuple[str, ...] = ()
    #: Peers that can't be measured here: name -> what is missing and how to get it.
    missing: Mapping[str, str] = field(default_factory=dict)
    #: Sequences of decode.
    batches: tuple[int, ...] = (1, 8, 64)
    #: Tokens of each sequence before the first decode step.
    context: int = 1024
    #: Lengths of prefill.
    prompts: tuple[int, ...] = (128, 1024, 4096)
    #: Number of rounds; every subject runs once in each.
    rounds: int = 5
    #: Decode steps of a subject per round.
    steps: int = 32
    #: The configuration of `core`'s engine; its sizes come from the cells.
    engine: EngineConfig = field(default_factory=EngineConfig)
    #: Show the kernels of `core` by node too.
    profile: bool = False

    def __post_init__(self) -> None:
        known = (*SUBJECTS, *self.peers)
        unknown = [name for name in self.subjects if name not in known]
        if unknown or not self.subjects:
            raise UsageError(
                f"--subjects {','.join(self.subjects)}",
                found=f"the subjects are {', '.join(known)}",
                remedy=f"leave out {', '.join(unknown)}" if unknown else "name at least one of these",
            )
        for option, values in (
            ("--batch", self.batches),
            ("--prefill", self.prompts),
            ("--context", (self.context,)),
            ("--rounds", (self.rounds,)),
            ("--steps", (self.steps,)),
        ):
            if any(value < 1 for value in values):
                asked = f"{option} {','.join(map(str, values))}"
                raise UsageError(asked, found="there is nothing below 1", remedy="pass whole numbers of at least 1")
        if not self.batches and not self.prompts:
            raise UsageError(
                "a bench of no cells", found="--batch and --prefill are both empty", remedy="give one of them a number"
            )

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All cells, decode first."""
        prefills = max(1, self.steps // _PREFILLS)
        decode = (
            Cell(phase="decode", batch=batch, tokens=self.context, steps=self.steps, rounds=self.rounds)
            for batch in self.batches
        )
        prefill = (
            Cell(phase="prefill", batch=1, tokens=tokens, steps=prefills, rounds=self.rounds) for tokens in self.prompts
        )
        return (*decode, *prefill)

    def check_length(self, max_position: int | None) -> None:
        """Raise `UsageError` where a sequence would grow longer than the model's context."""
        for cell in self.cells:
            if max_position is not None and cell.limit > max_position:
                option = "--context" if cell.phase == "decode" else "--prefill"
                raise UsageError(
                    f"{option} {cell.tokens}",
                    found=f"in {cell.rounds} rounds of {cell.steps} steps sequences grow to {cell.limit} tokens; "
                    f"the model has {max_position} positions",
                    remedy="ask for a shorter context, or for fewer rounds or steps",
                )


def bench(
    loaded: LoadedModel,
    device: Device,
    settings: Settings,
    *,
    title: str,
    references: Mapping[str, Mapping[str, float]] | None = None,
    rates: Rates | None = None,
    progress: Progress | None = None,
    peers: Mapping[str, Callable[[], Subject]] | None = None,
    apart: Mapping[str, Sequence[Record]] | None = None,
) -> BenchReport:
    """Measure every cell and return the report.

    loaded: a model on `device`; its modules are served by the engine, and copies that share its weights run beside it.
    rates: measured here unless given. progress: called with a cell's name, cells done and all cells, before each and
    after the last. peers: makes the subject of each of `settings.peers`. apart: by cell what was measured before.
    Raises `UsageError` for a context that the model does not have. An interrupt
    ends the run, and what was measured before it is reported, the fact "interrupted" naming what was not.
    """
    settings.check_length(loaded.max_position)
    started, start = datetime.now(UTC), time.perf_counter()
    cells = settings.cells
    codes = CACHE_DTYPES.get(settings.engine.kv_cache_dtype)
    shape = shape_of(loaded.model, max(cell.limit for cell in cells), codes)
    rates = rates or measure_rates(device, loaded.dtype)
    other = sharing_copy(loaded.model)
    engines = Engines(loaded, device, settings.engine, cells)
    reports: list[CellReport] = []
    interrupted = ""
    try:
        for index, cell in enumerate(cells):
            if progress is not None:
                progress(cell.name, index, len(cells))
            report = _measure(cell, engines, other, settings, shape, rates, peers or {})
            reports.append(replace(report, records=(*(apart or {}).get(cell.name, ()), *report.records)))
    except KeyboardInterrupt:
        if not reports:
            raise
        interrupted = f"before {', '.join(cell.name for cell in cells[len(reports) :])} had been measured"
    finally:
        engines.close()
    if settings.profile and not interrupted:
        for index, report in enumerate(reports):
            try:
                reports[index] = replace(report, kernels=_kernels(report.cell, loaded, device, settings, rates))
            except KeyboardInterrupt:
                interrupted = f"before the kernels of {report.cell.name} had been profiled"
                break
    if progress is not None:
        progress("done", len(cells), len(cells))
    facts = {
        **_facts(loaded, device, settings, title),
        "started": started.isoformat(timespec="seconds"),
        "elapsed_s": time.perf_counter() - start,
        "interrupted": interrupted or None,
    }
    return BenchReport(facts=facts, rates=rates, cells=tuple(reports), references=dict(references or {}))


def _measure(
    cell: Cell,
    engines: Engines,
    other: Any,
    settings: Settings,
    shape: Shape,
    rates: Rates,
    peers: Mapping[str, Callable[[], Subject]],
) -> CellReport:
    device = engines.device
    shared = SharedCache(other, device)
    both = {"eager", "core"} <= set(settings.subjects)
    subjects: list[Subject] = [
        CoreSubject(engines, keep_logits=both)
        if name == "core"
        else peers[name]()
        if name in settings.peers
        else StaticSubject(name, shared, keep_logits=both and name == "eager")
        for name in dict.fromkeys(settings.subjects)
    ]
    records, order = measure(subjects, cell, device)
    own = [record for record in records if record.subject not in settings.peers]
    check(cell, own, other, device, engines.rounding)
    check_peers(cell, [record for record in records if record.subject in settings.peers], own, other, device)
    if cell.phase == "decode":
        floor = decode_floor(shape, rates, cell.batch, cell.mean_context)
    else:
        floor = prefill_floor(shape, rates, cell.tokens)
    return CellReport(cell=cell, floor=floor, records=tuple(records), order=tuple(order))


def _kernels(
    cell: Cell, loaded: LoadedModel, device: Device, settings: Settings, rates: Rates
) -> Mapping[str, Any] | None:
    from core.bench.kernels import profile_phase
    from core.errors import CoreError

    options: dict[str, Any] = {"batch": cell.batch, "tokens": cell.tokens, "rates": rates}
    options |= {"kv_cache_dtype": settings.engine.kv_cache_dtype, "switches": settings.engine.options.switches}
    try:
        return profile_phase(loaded, device, cell.phase, **options).to_json()
    except CoreError as error:
        return {"error": str(error)}


def _facts(loaded: LoadedModel, device: Device, settings: Settings, title: str) -> dict[str, Any]:
    config = loaded.config.get_text_config()
    compilers = [compiler.package for compiler in device.kernel_compilers if compiler.package]
    return {
        "device": {
            "name": device.name,
            "product": device.capabilities.device_name,
            "plugin": device.plugin.distribution,
            "version": device.plugin.version,
        },
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in (*_PACKAGES, *compilers)},
            "torch": torch.__version__,  # torch's own version string names the build, which the metadata may lack
        },
        "model": {
            "title": title,
            "class": type(loaded.model).__name__,
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "num_parameters": loaded.num_parameters,
            "attention": loaded.config._attn_implementation,
            "shape": {name: getattr(config, name) for name in _SIZES if isinstance(getattr(config, name, None), int)},
        },
        "settings": {
            "subjects": list(settings.subjects),
            "missing": dict(settings.missing),
            "threads": torch.get_num_threads(),
            "batches": list(settings.batches),
            "context": settings.context,
            "prompts": list(settings.prompts),
            "rounds": settings.rounds,
            "steps": settings.steps,
            "options": engine_options(settings.engine),
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def read_references(path: Path) -> dict[str, dict[str, float]]:
    """Read reference figures: a JSON object, name -> cell (`decode/8`, `prefill/1024`) -> milliseconds.

    Raises `UsageError` for a file that is something else.
    """
    asked, remedy = f"--reference {str(path)!r}", 'write {"their name": {"decode/8": 5.2, "prefill/1024": 24.7}}'
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(asked, found=f"it can't be read: {error.strerror}", remedy="name a file") from None
    except ValueError as error:
        raise UsageError(asked, found=f"it is no JSON: {error}", remedy=remedy) from None
    if not isinstance(document, dict) or not all(_is_figures(cells) for cells in document.values()):
        raise UsageError(asked, found="it is no object of objects of positive numbers", remedy=remedy)
    return document


def _is_figures(cells: object) -> bool:
    return isinstance(cells, dict) and all(
        isinstance(ms, int | float) and not isinstance(ms, bool) and ms > 0 for ms in cells.values()
    )


def failed(report: BenchReport) -> bool:
    """Tell whether some subject's logits break the criterion, nothing could be measured, or not all that was asked."""
    records: Sequence[Record] = [record for cell in report.cells for record in cell.records]
    wrong = any(record.verdict.get("logits", {}).get("passed") is False for record in records)
    return wrong or bool(report.facts.get("interrupted")) or all(record.failure for record in records)

"""Soak the engine on tiny random models whose layers keep states, choose positions, or see chunks of a text.

    python tools/soak/soak_models.py [TYPE …] [--requests 200] [--seed 0] [--device cpu]

For each type 200 requests come, go, are aborted, lose their cache to others, are computed in chunks, begin alike and
are drafted for, as far as the type's route has that. Each must get the tokens that transformers' own generation gives
for its prompt alone. A type of which one differs fails the run; so does one on which something that its route has never
happened, or which leaves blocks of the cache taken.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import typer

from core.device import Device
from core.engine.models.loading import LoadedModel, build_model
from core.engine.models.tiny import tiny_config
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig
from core.host.selection import select_device
from staggered import EVENTS, MAX_LEN, TIGHT, counted, draw_jobs, faults, serve

TYPES = (
    "nemotron_h",
    "granitemoehybrid",
    "qwen3_next",
    "falcon_h1",
    "jamba",
    "zamba2",
    "lfm2",
    "mamba2",
    "recurrent_gemma",
    "llama4_text",
    "deepseek_v32",
    "glm_moe_dsa",
    "diffllama",
)
# A run is to be the same each time: not as many steps in a row as fit into some time.
CONFIG = replace(TIGHT, decode_steps=2)
"""Room for little more than one sequence of the longest context, and prompts of up to three chunks."""
NUM_DRAFTS = 2
_BEGINNINGS = 3


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one type did."""

    model_type: str
    route: str
    modes: str
    requests: int
    events: Counter[str]
    #: Event -> why the route has none.
    missing: dict[str, str]
    #: What is wrong.
    faults: list[str]
    seconds: float

    def line(self) -> str:
        """Return the row of a table in Markdown."""
        counts = ("-" if event in self.missing else str(self.events[event]) for event in EVENTS)
        equal = "no" if any(fault.startswith("request") for fault in self.faults) else "yes"
        return f"| {' | '.join((f'`{self.model_type}`', self.route, str(self.requests), *counts, equal))} |"


HEAD = f"| type | route | requests | {' | '.join(EVENTS)} | equal |\n|---|---|---|{'---|' * len(EVENTS)}---|"


def soak(
    model_type: str,
    device: Device,
    requests: int,
    *,
    seed: int = 0,
    config: EngineConfig = CONFIG,
    spoil: Callable[[Engine], None] | None = None,
) -> Row:
    """Serve so many requests of a type on a device. spoil: plants a mistake before they come."""
    start = time.perf_counter()
    loaded = build(model_type, device)
    jobs = draw_jobs(loaded.model, requests, seed=seed, beginnings=_BEGINNINGS, max_len=MAX_LEN)
    with _opened(loaded, device, replace(config, speculative=NUM_DRAFTS)) as engine:
        if spoil is not None:
            spoil(engine)
        serve(engine, jobs, seed=seed)
        reasons = {event: why(engine) for event, why in EVENTS.items()}
        return Row(
            model_type=model_type,
            route=engine.route,
            modes=", ".join(f"{phase} {mode}" for phase, mode in engine.report().modes.items()),
            requests=requests,
            events=counted(engine, jobs),
            missing={event: why for event, why in reasons.items() if why},
            faults=faults(engine, jobs),
            seconds=time.perf_counter() - start,
        )


def _opened(loaded: LoadedModel, device: Device, config: EngineConfig) -> Engine:
    """Return an engine, with rows for several sequences where it runs on the static cache."""
    engine = Engine(loaded, device, config)
    if engine.route == "paged":
        return engine
    engine.close()
    return Engine(loaded, device, replace(config, cache_tokens=None, max_step_tokens=None))


def build(model_type: str, device: Device, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Return a tiny model with random weights, the same each time."""
    return build_model(tiny_config(model_type), torch_device=device.torch_device, dtype=dtype)


def main(
    types: Annotated[list[str] | None, typer.Argument(help="Model types; else those of interest.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Of each type.")] = 200,
    seed: Annotated[int, typer.Option(help="Of prompts, and of when they come and go.")] = 0,
    device: Annotated[str, typer.Option(help="What the models run on.")] = "cpu",
) -> None:
    """Soak each type, and report a row of each."""
    rows = []
    for model_type in types or TYPES:
        rows.append(row := soak(model_type, select_device(device), requests, seed=seed))
        print(f"{model_type}: {row.seconds:.0f} s, {row.route}, {row.modes}; {len(row.faults)} faults", flush=True)
        for line in (*(f"no {event}: {why}" for event, why in row.missing.items()), *row.faults[:20]):
            print(f"  {line}", flush=True)
    print("\n".join((HEAD, *(row.line() for row in rows))))
    if any(row.faults for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

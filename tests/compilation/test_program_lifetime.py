"""How long a program, its outputs and what it holds live."""

from __future__ import annotations

import gc
import weakref

import torch

from tests.compilation.test_program import compiled, double, rows


def test_an_output_that_is_an_input_in_disguise_survives_another_bucket() -> None:
    program = compiled(lambda x: (x.float(), x.view(-1, 2), x * 2), [4, 8])
    first = program(x=torch.full((4, 2), 1.0))
    program(x=torch.full((8, 2), 9.0))
    assert torch.equal(first[0], torch.full((4, 2), 1.0)) and torch.equal(first[1], first[0])


def test_a_program_compiled_in_inference_mode_runs_outside_of_it() -> None:
    with torch.inference_mode():
        program = compiled(double, [4])
    assert torch.equal(program(x=rows(3)), rows(3) * 2)


def test_a_closed_program_frees_weights_and_buffers() -> None:
    refs = []
    for _ in range(3):
        layer = torch.nn.Linear(2, 2)
        program = compiled(lambda x, layer=layer: layer(x), [4])
        refs += [weakref.ref(layer.weight), weakref.ref(next(iter(program.inputs(program.keys[0]).values())))]
        program.close()
        del layer, program
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)

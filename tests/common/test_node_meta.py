"""core/common/node_meta.py: fake values under the key of the node's graph, and what a new node inherits."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from core.common.node_meta import ATEN, ORIGIN, TRACED, describe, origin_of, set_value, value_key, value_of

OLD, NEW = torch.ones(2), torch.zeros(3)


def node_with(**meta: object) -> fx.Node:
    node = fx.Graph().placeholder("x")
    node.meta.update(meta)
    return node


@pytest.mark.parametrize("key", [TRACED, ATEN])
def test_a_value_is_read_and_written_where_the_graph_has_its_values(key: str) -> None:
    node = node_with(**{key: OLD})
    assert value_of(node) is OLD and value_key(node) == key
    set_value(node, NEW)
    assert node.meta == {key: NEW}


def test_where_both_are_there_what_is_written_is_what_is_read() -> None:
    node = node_with(val=OLD, example_value=OLD)
    set_value(node, NEW)
    assert value_of(node) is NEW


def test_what_has_no_value_has_none() -> None:
    assert value_of(node_with()) is None and value_of(3) is None and value_of(None) is None


@pytest.mark.parametrize("key", [TRACED, ATEN])
def test_a_new_node_inherits_where_it_came_from_and_nothing_else(key: str) -> None:
    origin = dict.fromkeys(ORIGIN, "somewhere")
    like = node_with(**origin, **{key: OLD}, mine="kept to itself")
    made = node_with()
    describe(made, like, NEW)
    assert made.meta == {**origin, key: NEW} and origin_of(like) == origin


def test_a_new_node_of_an_unknown_value_gets_none() -> None:
    made = node_with()
    describe(made, node_with(val=OLD, stack_trace="somewhere"))
    assert made.meta == {"stack_trace": "somewhere"}

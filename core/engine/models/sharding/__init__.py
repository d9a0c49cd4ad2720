"""Tensor parallelism: which part of a model each process holds, and how parts become whole results again."""

from core.engine.models.sharding.plan import ExpertCut, Planned, plan_of, planned
from core.engine.models.sharding.reference import quantize_in_parts
from core.engine.models.sharding.shard import cut_parameters, shard_model

__all__ = ["ExpertCut", "Planned", "cut_parameters", "plan_of", "planned", "quantize_in_parts", "shard_model"]

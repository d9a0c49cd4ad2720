"""What recurrent layers compute for one token of each sequence, on states in slots."""

from core.common.ops.recurrent.convolution import CAUSAL_CONV1D_UPDATE
from core.common.ops.recurrent.delta_rule import GATED_DELTA_RULE
from core.common.ops.recurrent.state_space import SELECTIVE_STATE_UPDATE

__all__ = ["CAUSAL_CONV1D_UPDATE", "GATED_DELTA_RULE", "SELECTIVE_STATE_UPDATE"]

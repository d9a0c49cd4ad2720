"""The passes that every device gets, in the order in which they run unless a declaration says otherwise."""

from __future__ import annotations

from core.common.passes.declaration import Pass
from core.common.passes.lift.add_rms_norm import FUSE_ADD_RMS_NORM
from core.common.passes.lift.gated_activation import LIFT_GATED_ACTIVATION
from core.common.passes.lift.rms_norm import LIFT_RMS_NORM
from core.common.passes.lift.rotary import LIFT_ROTARY

COMMON_PASSES: tuple[Pass, ...] = (
    LIFT_RMS_NORM,
    FUSE_ADD_RMS_NORM,
    LIFT_GATED_ACTIVATION,
    LIFT_ROTARY,
)

"""Fake kernels for ops of foreign libraries: declared as data by plugins, applied where the library lacks them."""

from core.common.fakes.declaration import FakeOp as FakeOp
from core.common.fakes.declaration import FakeResult as FakeResult
from core.common.fakes.declaration import ShapeRule as ShapeRule
from core.common.fakes.registering import apply_fakes as apply_fakes
from core.common.fakes.registering import apply_late as apply_late
from core.common.fakes.registering import has_fake as has_fake
from core.common.fakes.rules import Rule as Rule
from core.common.fakes.rules import argument as argument
from core.common.fakes.rules import half_last as half_last
from core.common.fakes.rules import like as like
from core.common.fakes.rules import new as new
from core.common.fakes.rules import nothing as nothing
from core.common.fakes.rules import part as part
from core.common.fakes.rules import results as results
from core.common.fakes.rules import with_last as with_last
from core.common.fakes.sizes import arg as arg
from core.common.fakes.sizes import computed as computed
from core.common.fakes.sizes import size as size

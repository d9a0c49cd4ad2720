"""How much of a device's memory a cache may take, on either route."""

DEFAULT_FRACTION = 0.9
"""Share of the device's memory that an engine fills at most, weights and graphs included."""
EASY = 0.5
"""If the cache takes at most this share of the free memory, the memory of a step need not be measured."""
GRAPHS = 1.5
"""Memory that captured graphs hold, as a multiple of what the largest step takes while it runs."""

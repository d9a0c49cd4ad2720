"""Cases that run in several processes of one job, each a rank: `area/processes/…`."""

DEFAULT_RANKS = 2
MAX_RANKS = 8
"""Processes of such a case: unless a run asks for more, and at most."""


def is_ranked(case_id: str) -> bool:
    """Tell whether a case of this id runs in several processes."""
    return case_id.split("/")[1:2] == ["processes"]

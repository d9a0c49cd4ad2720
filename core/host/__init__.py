"""Which devices there are and the one that is asked for: discovery, probes, loading, selection."""

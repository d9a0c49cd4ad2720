"""How a device captures and replays callables: the protocol `GraphBackend`, and ready-made backends."""

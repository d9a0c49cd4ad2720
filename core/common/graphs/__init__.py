"""What a device captures callables with and replays them: the protocol, and two ready-made backends."""

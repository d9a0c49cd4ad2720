"""Static buffers, keys and the runner: capture and replay, whatever the device."""

"""The cases, one module per area; each has `collect(device, profile)`."""

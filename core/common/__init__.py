"""Device-neutral parts that plugins may import; nothing here imports the host or a plugin."""

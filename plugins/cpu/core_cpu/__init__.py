"""The device plugin for the processor: the smallest complete plugin, and the one to read first."""

"""The device plugin for Ascend NPUs."""

"""Cases on the device's own graphs."""

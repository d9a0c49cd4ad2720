"""Cases on the plugin itself: discovery, probe, loading, opening."""

"""The compile cache: what a trace depends on, graphs as readable text, and the folder that keeps both."""

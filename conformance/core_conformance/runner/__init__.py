"""One run of the suite: collected, spread over processes, put together."""

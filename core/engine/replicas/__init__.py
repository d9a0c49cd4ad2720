"""Several servers of one model, placed, watched and replaced by Ray Serve: `core serve --ray`."""

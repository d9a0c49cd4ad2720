"""Whether a declared fake tells what its kernel does."""

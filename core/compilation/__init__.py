"""From a model to a captured program: `compile.py` is the door, `pipeline.py` the way through."""

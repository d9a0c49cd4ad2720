"""From a model to a captured program: `compile.py` holds the entry points, `pipeline.py` the stages in order."""

"""A model in, a Dynamo graph out, and what a model must not keep."""

"""Passes that need no canonical op: they remove nodes that compute nothing and join nodes that compute the same.

No-ops go before the lifts, which then meet fewer spellings. The others come after them: the lifts read a model as it
was written, where each layer has its own tables and each projection its own result.
"""

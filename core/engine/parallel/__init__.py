"""One model on several processes: how they start, agree, share the cores of a machine, and end together."""

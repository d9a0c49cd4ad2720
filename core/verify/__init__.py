"""Checks that a pass kept the numbers: graphs before and after it on real inputs, judged against an fp64 run."""

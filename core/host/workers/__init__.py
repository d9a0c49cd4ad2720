"""Processes that run what may crash or hang: started, asked with a deadline, ended."""

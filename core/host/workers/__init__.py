"""Worker processes for code that may crash or hang: started, asked with a deadline, ended."""

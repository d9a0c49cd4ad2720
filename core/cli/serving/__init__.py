"""`core serve`: by one server, or by replicas."""

"""`bisect`: the first pass, op implementation or region that breaks the numbers."""

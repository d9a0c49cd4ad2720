"""Graph passes: their declaration and the manager that orders, runs, checks and reports them."""

"""One phase of a program: traced and rewritten, or captured as it is."""

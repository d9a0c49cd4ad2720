"""The sections of docs/performance.md that are written from documents of one kind."""

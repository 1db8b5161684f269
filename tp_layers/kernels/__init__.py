"""One operation per file: its launcher, and its reference in plain torch."""

"""Training, corpus rewriting and export (extra `train`)."""

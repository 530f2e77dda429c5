"""Training, rewriting and export; needs the extra `train`."""

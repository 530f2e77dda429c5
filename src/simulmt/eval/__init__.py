"""Evaluation: quality, latency, significance and reports."""

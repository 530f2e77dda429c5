"""The paper's networks in PyTorch (extra `train`)."""

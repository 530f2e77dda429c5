"""The networks of the paper in PyTorch; needs the extra `train`."""

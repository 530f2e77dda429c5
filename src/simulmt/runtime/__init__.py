"""The live runtime: bundles, ONNX graphs and caches, decoding, streams. No PyTorch."""

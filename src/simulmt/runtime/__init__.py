"""What a stream runs on: bundles, graphs and their caches, decoding, search, sentence ends. No PyTorch here."""

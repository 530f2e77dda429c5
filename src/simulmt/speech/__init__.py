"""Speech recognition in front of the runtime."""

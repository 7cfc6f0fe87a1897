"""One run: what is loaded, the loop from start to end, its folder, checkpoints, evaluations and trackers."""

"""One run: loading, the training loop, the run folder, checkpoints, evaluations and trackers."""

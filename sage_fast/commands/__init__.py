"""The commands of `sage-fast`, one module each, with what a command does beyond a run."""

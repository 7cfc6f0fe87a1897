"""Video models: the code they share, and one folder per family."""

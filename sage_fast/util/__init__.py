"""What every room may use: files, console, metrics, profiling, environment, errors, seeds and ranks."""

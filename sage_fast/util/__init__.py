"""Helpers that every package may use: files, console, metrics, profiling, environment, errors,
seeds and ranks."""

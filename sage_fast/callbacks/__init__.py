"""Callbacks: their interface, and those that a run always has."""

"""Prompt sets."""

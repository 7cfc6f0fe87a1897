"""Prompts and their embeddings."""

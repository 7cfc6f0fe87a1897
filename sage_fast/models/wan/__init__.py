"""Wan 2.1 and Wan 2.2 TI2V, text-to-video."""

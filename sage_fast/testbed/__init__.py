"""The testbed: the moving-shapes world, tiny instances of the real model classes, and their base weights."""

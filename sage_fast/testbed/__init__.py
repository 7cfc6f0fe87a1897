"""The moving-shapes world: tiny instances of the real classes, their base weights, and how they were made."""

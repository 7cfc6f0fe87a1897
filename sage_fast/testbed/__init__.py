"""The moving-shapes world: scenes and words, the area that a shape covers, and a judge network."""

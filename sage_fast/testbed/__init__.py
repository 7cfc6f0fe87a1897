"""The moving-shapes world: scenes and words, corruptions of a clip, and a judge network."""

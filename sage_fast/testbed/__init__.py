"""The moving-shapes world: scenes and words, their drawing, and a judge network."""

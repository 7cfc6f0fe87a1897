"""The moving-shapes world: its scenes and words, what can go wrong in a clip, and the judge that looks at one."""

"""The study of the demo: what it and its challenger gain on ten seeds, word by word."""

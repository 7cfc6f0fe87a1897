"""The second world of the race: two shapes in a larger frame.

Its model, its rewards and its weights are all here.
"""

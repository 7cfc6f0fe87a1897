"""The first world of the race and of the paper's study: circles, squares and triangles.

The testbed was this world before it had balls. Its model, its rewards and its weights are all here.
"""

"""The first world of the race and of the paper's study: circles, squares and triangles.

It was the testbed's before its balls. Its model, its rewards and its weights are all here.
"""

"""Studies on tiny models: the paper's claims (`paper`), recipes at equal compute (`race`), the
demo's settings (`search`) and its gain (`demo`).

`shapes` and `pairs` are the worlds of the first three, `testbed` makes and looks at base models.
"""

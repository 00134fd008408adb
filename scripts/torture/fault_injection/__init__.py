"""The cases of `torture.py`, one module per kind of fault.

A case is a function (work folder, index, random) -> error message or None. Fixtures that several
cases use are created once in the work folder.
"""

"""What `torture.py` does, by the kind of harm.

A case is a function of (work folder, index, random) that says what went wrong, or None. What cases
of a row share is made once in the work folder.
"""

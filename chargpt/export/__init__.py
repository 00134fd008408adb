"""Export of a run to the formats of other programs, which open and check it."""

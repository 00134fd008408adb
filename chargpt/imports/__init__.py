"""Import: runs from the files of other programs."""

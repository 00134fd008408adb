"""Export of a run to the formats of other tools, each checked by reading it back; and import."""

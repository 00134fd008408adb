"""Text in, token arrays out. Knows nothing of models."""

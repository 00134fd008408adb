"""A model and text in; text and numbers out."""

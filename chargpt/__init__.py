"""Train, sample and measure character-level GPT models."""

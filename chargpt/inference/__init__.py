"""Evaluation, sampling, scoring and compression with trained models."""

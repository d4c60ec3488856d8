"""Measurements: what speculation and the split are worth, each beside its configuration."""

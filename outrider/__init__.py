"""Outrider: distributed speculative decoding. The code shared by the draft, target and orchestrator services."""

__version__ = "0.1.0"

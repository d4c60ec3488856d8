"""Outrider: distributed speculative decoding. What the draft, target and orchestrator services share."""

__version__ = "0.1.0"

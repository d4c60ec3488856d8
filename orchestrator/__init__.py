"""The orchestrator: sessions, admission, and the flow of proposals and verdicts. Imports no torch."""

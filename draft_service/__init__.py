"""The draft service: proposes token trees for many sessions at once."""

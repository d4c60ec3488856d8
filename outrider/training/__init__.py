"""Making drafts that fit their target: data from the target itself, and networks trained to guess what it says."""

import outrider.lm  # noqa: F401  (before transformers, whose optional libraries it keeps quiet)

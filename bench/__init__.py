"""Measurements that anyone can run: `outrider bench`."""

import outrider.lm  # noqa: F401  # before transformers, which it keeps quiet

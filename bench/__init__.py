"""The benchmarks of `outrider bench`."""

import outrider.lm  # noqa: F401  # before transformers: it reduces the logging of transformers' optional libraries

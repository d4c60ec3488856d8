"""Ways to guess what a session's target says next: look it up (`ngram`), or ask a small model (`model`, `layers`)."""

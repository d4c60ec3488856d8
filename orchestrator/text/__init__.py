"""Between text and token ids: tokenizers, message content, streamed detokenization, stop strings."""

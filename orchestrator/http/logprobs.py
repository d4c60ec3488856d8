"""Log-probabilities of tokens in OpenAI's two forms."""

from collections.abc import Sequence
from typing import Any

from orchestrator.text.tokenizer import Tokenizer
from outrider.v1 import tokens_pb2


class TokenTexts:
    """Texts of single tokens, as log-probabilities show them.

    Args:
        tokenizer: of the model; None where it has none, and tokens are shown by their ids.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def of(self, token_id: int) -> str:
        """Return a token's text; a part of a character is U+FFFD."""
        return f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.decode([token_id])

    def chat(self, token_ids: Sequence[int], known: Sequence[tokens_pb2.TokenLogprobs]) -> dict[str, Any]:
        """Return the object `logprobs` of a chat completion's choice."""
        content = []
        for token_id, item in zip(token_ids, known, strict=False):
            pairs = zip(item.top_token_ids, item.top_logprobs, strict=True)
            content.append(
                {**self._entry(token_id, item.logprob), "top_logprobs": [self._entry(*pair) for pair in pairs]}
            )
        return {"content": content, "refusal": None}

    def completion(
        self, token_ids: Sequence[int], known: Sequence[tokens_pb2.TokenLogprobs], text_offset: int
    ) -> dict[str, Any]:
        """Return the object `logprobs` of a completion's choice; `text_offset` is where these tokens begin."""
        tokens = [self.of(token_id) for token_id in token_ids[: len(known)]]
        offsets = []
        for token in tokens:
            offsets.append(text_offset)
            text_offset += len(token)
        top = [
            {
                **{self.of(other): value for other, value in zip(item.top_token_ids, item.top_logprobs, strict=True)},
                token: item.logprob,
            }
            for token, item in zip(tokens, known, strict=True)
        ]
        return {
            "tokens": tokens,
            "token_logprobs": [item.logprob for item in known],
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.of(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

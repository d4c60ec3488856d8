"""Tokenizers that write characters which have no token as single bytes."""

import json

import tokenizers


def unsettled_tokens_of(tokenizer: tokenizers.Tokenizer) -> frozenset[int]:
    """Return the ids of the tokens after which text is never certain.

    Where the decoder joins single bytes to characters, they are the tokens that stand for single bytes, and the special
    tokens, because they are left out before the bytes around them are joined.
    """
    if "ByteFallback" not in json.dumps(json.loads(tokenizer.to_str())["decoder"]):
        return frozenset()
    found = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    special = (token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    return frozenset(token_id for token_id in (*found, *special) if token_id is not None)

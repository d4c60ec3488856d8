"""Generates with transformers alone, for comparison: reads [text, num_tokens, num_speculative_tokens] a line."""

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.lm.embedded import ensure_embedded


def main() -> None:
    """Answers every line of standard input with {"token_ids", "seconds"}."""
    folder = ensure_embedded()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for line in sys.stdin:
        text, num_tokens, num_speculative_tokens = json.loads(line)
        inputs: Any = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        lookup = {"prompt_lookup_num_tokens": num_speculative_tokens} if num_speculative_tokens else {}
        started = time.perf_counter()
        with torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False, **lookup)
        seconds = time.perf_counter() - started
        token_ids = output[0, inputs["input_ids"].shape[1] :].tolist()
        print(json.dumps({"token_ids": token_ids, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()

"""Between text and token ids: tokenizers, message content, streamed detokenization, stop strings.

A raw text is the caller's whole prompt: special tokens written in it are read as such, as completions of OpenAI and
vLLM are. The content of a chat message is plain text, whatever it contains (`content`): before the template is
rendered, special tokens in contents are marked with private characters, drawn at random for each tokenizer. The
special tokens left in the rendered text are the template's; they get stand-ins, the marks go, and a second tokenizer
that reads special tokens as text encodes the whole at once. A template that cuts a mark in two leaves private
characters in the text, and no control token. What a tokenizer does not call special (`<think>` in some models) is
read as before.
"""

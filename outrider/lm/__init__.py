"""Running a causal language model: loading, KV cache, attention, one forward pass over many sessions."""

import logging

# Where torchao is installed, transformers imports it, and it names at every start the GPU code that it cannot load.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)

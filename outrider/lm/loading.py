"""Loading of models by name: a folder, a hub id, the embedded model, a Markov model or a synthetic model."""

from dataclasses import replace
from typing import Final

from outrider.errors import InvalidArgument, ModelUnsupported
from outrider.lm import embedded
from outrider.lm.load_options import LoadedModel, LoadOptions
from outrider.lm.markov import MarkovModel
from outrider.lm.synthetic import PREFIX, RENAMED_PREFIX, SyntheticModel, SyntheticOptions

_MARKOV: Final = "markov:"


def load_model(name: str, options: LoadOptions | None = None) -> LoadedModel:
    """Load a causal language model and check that it can be served exactly.

    Args:
        name: a folder, a hub id, `embedded`, `markov:` or `synthetic:` with options (see `markov`, `synthetic`).
        options: see `LoadOptions`; the defaults if None.

    Raises:
        InvalidArgument: an option of the name or of `options` is invalid.
        ModelUnsupported: the model cannot be loaded, or cannot be served exactly.
    """
    options = options or LoadOptions()
    if name.startswith(RENAMED_PREFIX):
        new = PREFIX + name.removeprefix(RENAMED_PREFIX)
        raise InvalidArgument(f"the prefix {RENAMED_PREFIX} was renamed, use {new!r}", "model")
    if name.startswith(PREFIX):
        synthetic = SyntheticOptions.from_name(name)
        base = load_model(synthetic.base, replace(options, num_layers=synthetic.num_layers or options.num_layers))
        return replace(base, model=SyntheticModel(base.model, synthetic))
    if name.startswith(_MARKOV):
        if options.ranks is not None:
            raise ModelUnsupported("a Markov model has no weights to split among ranks")
        model = MarkovModel.from_name(name, options.kv_budget_bytes)
        return LoadedModel(model, model.tokenizer)
    # Imported here: importing transformers takes seconds, and Markov models, which tests restart often, do not need it.
    from outrider.lm.pretrained import load_pretrained

    return load_pretrained(name, str(embedded.ensure_embedded()) if name == embedded.NAME else name, options)

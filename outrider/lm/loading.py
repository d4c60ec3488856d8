"""Names to models: a folder, a hub id, the embedded model, a Markov model of known law, or one of a planted pair."""

from dataclasses import replace
from typing import Final

from outrider.errors import ModelUnsupported
from outrider.lm import embedded
from outrider.lm.load_options import LoadedModel, LoadOptions
from outrider.lm.markov import MarkovModel
from outrider.lm.planted import PREFIX, PlantedModel, PlantedOptions

_MARKOV: Final = "markov:"


def load_model(name: str, options: LoadOptions | None = None) -> LoadedModel:
    """Loads a causal language model and probes that it can be served exactly.

    Args:
        name: a folder, a hub id, `embedded`, `markov:` or `planted:` with options (see `markov`, `planted`).
        options: see there.

    Raises:
        InvalidArgument: a value is not understood.
        ModelUnsupported: the model cannot be loaded, or cannot be served exactly.
    """
    options = options or LoadOptions()
    if name.startswith(PREFIX):
        planted = PlantedOptions.from_name(name)
        base = load_model(planted.base, replace(options, num_layers=planted.num_layers or options.num_layers))
        return LoadedModel(PlantedModel(base.model, planted), base.tokenizer, base.run)
    if name.startswith(_MARKOV):
        if options.ranks is not None:
            raise ModelUnsupported("a Markov model has no weights to split among ranks")
        return LoadedModel(MarkovModel.from_name(name, options.kv_budget_bytes), None)
    # Imported here: transformers takes seconds, and a Markov model, which tests restart all the time, needs none of it.
    from outrider.lm.pretrained import load_pretrained

    return load_pretrained(name, str(embedded.ensure_embedded()) if name == embedded.NAME else name, options)

"""Which tokens a constraint allows: grammars, compiled by llguidance, and the matchers that follow an output.

`source` writes a constraint as a grammar, `compilation` compiles a grammar, `compiler` those of a worker's requests in
threads of its own, `matcher` follows the output of a request, `masks` has the tokens that may follow the nodes of many
proposals computed together, natively and on all cores, `checking` is a process that compiles constraints to check them.
All but `masks` runs without a model library.

What is allowed after a text follows from the constraint and the text's tokens alone: whether these were drafted,
generated here or elsewhere, and in which order a matcher came there, changes nothing.
"""

from typing import Final

import llguidance

GRAMMAR_LIBRARY: Final = llguidance.get_version().split()[0].replace("@", " ")
"""Name and version of the library: with another one a constraint may allow other tokens."""

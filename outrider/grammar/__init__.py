"""Which tokens a constraint allows: grammars, compiled by llguidance, and the matchers that follow an output.

`source` writes a constraint as a grammar, `compiler` compiles grammars for one tokenizer and keeps them, `matcher`
follows the output of a request, `masks` has the tokens that may follow the nodes of many proposals computed in one native
call, `checking` is a process that compiles constraints to check them.
The grammar decides what is allowed after a text by its tokens alone: whether they were drafted, generated here or
elsewhere, and in which order matchers came there, changes nothing.
"""

from typing import Final

import llguidance

GRAMMAR_LIBRARY: Final = llguidance.get_version().split()[0].replace("@", " ")
"""Name and version of the library: with another one a constraint may allow other tokens."""

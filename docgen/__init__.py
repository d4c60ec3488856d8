"""The parts of the documentation that are made from the code: reference pages, and the picture of a takeover.

`make docs-pages` writes the pages, `make docs-picture` records the picture, `make docs` builds the site from docs/.
"""

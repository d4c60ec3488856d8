"""The command line `outrider`: `main`, a module for each command, and what commands share."""

"""The commands of `outrider`, a module each, and what they share: options, connection, rendering."""

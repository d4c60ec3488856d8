"""The plug-in for vLLM: with a fake of its scheduler here, with vLLM itself in `real`."""

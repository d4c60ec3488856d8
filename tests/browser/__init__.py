"""The playground in a real Chromium, on real stacks: `make browser`."""

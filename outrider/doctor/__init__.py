"""What is missing before a stack can run, on this machine or in a cluster: the checks of `outrider doctor`."""

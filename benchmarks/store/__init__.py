"""The store's data path against the machine's: every path and its baseline in turns, in one run."""

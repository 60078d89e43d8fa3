"""The tuners' goals, measured on traces: one module for each part, ``__main__`` for the command."""

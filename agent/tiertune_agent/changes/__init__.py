"""From what tuners wish to a change that is made, watched and judged."""

"""What others' connectors tell of themselves, as a store's counters: read only, and what is not told stays unknown."""

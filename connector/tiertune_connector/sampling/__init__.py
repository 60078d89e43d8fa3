"""What a store learns from lookups for the sake of what-if."""

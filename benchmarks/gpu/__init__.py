"""What sharing does on a GPU: ``python -m benchmarks.gpu``."""

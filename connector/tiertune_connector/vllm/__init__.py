"""The adapter for vLLM. Nothing is imported here, so that its pure parts load where vLLM is not installed."""

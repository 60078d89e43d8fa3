"""The agent's HTTP: JSON API and page."""

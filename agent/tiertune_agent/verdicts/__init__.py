"""What a change, a fetch and a window were worth. Pure."""

"""The store as a process: its socket, its HTTP, how it starts and ends."""

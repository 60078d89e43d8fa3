"""An engine's side of the socket: requests to the store of its host."""

"""What client and store say to each other, and how a message is framed."""

"""What the commands share: options, tables, a progress bar."""

"""What the commands have in common: options, tables, a bar that shows how far work has come."""

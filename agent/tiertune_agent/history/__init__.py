"""What the agent remembers, in SQL. The only folder that knows SQL."""

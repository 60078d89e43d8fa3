"""What is wrong with a deployment, and how to mend it: facts are gathered, checks read them, a report tells."""

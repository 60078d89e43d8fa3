"""What a policy would have done over what was recorded. Nothing is changed."""

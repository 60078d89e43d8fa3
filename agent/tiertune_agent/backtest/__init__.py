"""What a policy would have done over recorded history. Nothing is changed."""

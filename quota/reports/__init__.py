"""What people and machines are told of a project: its status, what was spent, metrics, messages."""

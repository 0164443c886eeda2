"""What all engines share: the actions of one step on values."""

"""What each stage does when."""

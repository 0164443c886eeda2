"""What a user may ask for: the table of options, their forms, and what makes no sense together."""

"""Graph -> Profile: what each op costs, measured or estimated."""

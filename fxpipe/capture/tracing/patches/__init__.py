"""What replaces functions of torch while a model is traced."""

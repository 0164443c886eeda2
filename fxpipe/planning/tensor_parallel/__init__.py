"""How a group of devices shares the ops of a model, and what each op then costs."""

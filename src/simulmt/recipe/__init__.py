"""A whole experiment as one file: what a recipe says (`plan`), what of it is done (`state`), doing it (`runner`)."""

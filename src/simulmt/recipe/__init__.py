"""Recipes, whole experiments in one file: parsing (`plan`), up-to-date checks (`state`), running (`runner`)."""

"""A race of recipes: what each gains on held-out prompts for the same compute."""

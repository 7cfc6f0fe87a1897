"""Small tools that need no run."""

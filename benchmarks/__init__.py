"""Every figure that the documentation quotes, and the command that makes it."""

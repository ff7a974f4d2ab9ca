"""Where candidates come from, one source a file."""

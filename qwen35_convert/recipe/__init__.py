"""What was asked for: recipes and their sections, as files, with every mistake named."""

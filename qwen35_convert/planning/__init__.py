"""What a conversion will do, known before a weight is read."""

"""What a checkpoint is and how to serve it."""

"""What lies beside the tensors of a folder and says how text and images become numbers."""

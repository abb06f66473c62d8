"""Four bits a weight, and eight as whole numbers, as compressed-tensors stores them."""

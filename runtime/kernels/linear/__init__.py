"""Products with stored weights, and the dense feed-forward made of them."""

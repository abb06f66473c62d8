"""The gated delta rule over pools of states, and the convolution before it."""

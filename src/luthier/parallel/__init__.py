"""Where tensors of one model live on several devices, and what that means for sums over them."""

"""hybridize: turn a pretrained Transformer into a hybrid linear-attention model."""

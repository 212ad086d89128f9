"""The model: checkpoints, tokenizer, forward pass, sampling. Knows no HTTP."""

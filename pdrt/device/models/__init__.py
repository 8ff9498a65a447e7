"""Model families, one module each: weights in, hidden states out."""
